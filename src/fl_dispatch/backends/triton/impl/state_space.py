"""Selective state spaces: one token of each request in one launch, prompts by matrix products or by a scan."""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import Launcher, power_of_two, processors, shared_memory
from .state_space_kernels import _chunks, _token, _walk

TOKEN_TILE = 2048
"""Numbers of the states that a program takes for one token."""
CHUNK, CHUNK_WIDE = 64, 32
"""Tokens that matrix products take together, for half types and for float32."""
LARGEST_STATE = 256
"""Columns of a state up to which a program has room for a chunk."""
LEAST = 16
"""The shortest side of a matrix product."""
WALK_TOKENS, WALK_TILE = 32, 256
"""Tokens that a scan takes together, and numbers of the states that a program takes with them."""

_update = Launcher(_token)
_by_chunks = Launcher(_chunks)
_by_tokens = Launcher(_walk)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    has_state: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.state_space.selective_scan`. Nothing waits for the device."""
    out = x.new_empty(x.shape)
    requests, columns = len(state_indices), states.shape[3]
    if not requests or not x.numel():
        return out
    by_products = a.dim() == 1 and x.dtype is not torch.float64 and columns <= LARGEST_STATE
    launch = _scan_by_products if by_products else _scan_by_tokens
    slots, starts = (one if one.stride(0) == 1 else one.contiguous() for one in (state_indices, query_start_loc))
    launch(x, dt, a, b, c, d, dt_bias, states, slots, starts, has_state, out)
    return out


def _scan_by_products(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    has_state: Tensor | None,
    out: Tensor,
) -> None:
    _, heads, head_dim = x.shape
    requests, columns = len(slots), states.shape[3]
    wide = x.dtype is torch.float32
    chunk, block = CHUNK_WIDE if wide else CHUNK, max(LEAST, power_of_two(columns))
    rows = max(LEAST, min(power_of_two(head_dim), 32 if wide or block > 128 else 64))
    if rows == 64 and heads * -(-head_dim // rows) < processors(x.device):
        rows = 32  # whatever the batch is: a start meets every kernel
    tiles = chunk * (2 * block + rows) * x.element_size()  # what a stage of the loop loads
    room = shared_memory(x.device)
    _by_chunks(
        (heads * -(-head_dim // rows), requests, 1),
        (
            *(x, dt, a, b, c, x if d is None else d, x if dt_bias is None else dt_bias, states, slots, starts),
            *(slots if has_state is None else has_state.view(torch.uint8), out),
        ),
        (
            *x.stride(),
            *dt.stride(),
            *a.stride(),
            *b.stride(),
            *c.stride(),
            *_strides(d, dt_bias),
            *states.stride(),
            heads,
            head_dim,
            columns,
            heads // b.shape[1],
            has_state is not None,
            d is not None,
            dt_bias is not None,
            "ieee" if wide else "tf32",  # half types take no notice
            chunk,
            rows,
            block,
        ),
        warps=4,
        stages=2 if not room or room > 3 * tiles else 1,
    )


def _scan_by_tokens(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    has_state: Tensor | None,
    out: Tensor,
) -> None:
    _, heads, head_dim = x.shape
    columns, group = states.shape[3], heads // b.shape[1]
    block = power_of_two(columns)
    rows = max(1, WALK_TILE // block)
    _by_tokens(
        (-(-heads * head_dim // rows), len(slots), 1),
        (
            *(x, dt, a, b, c, x if d is None else d, x if dt_bias is None else dt_bias, states, slots, starts),
            *(slots if has_state is None else has_state.view(torch.uint8), out),
        ),
        (
            *x.stride(),
            *dt.stride(),
            *_strides_by_column(a),
            *b.stride(),
            *c.stride(),
            *_strides(d, dt_bias),
            *states.stride(),
            heads,
            head_dim,
            columns,
            group,
            has_state is not None,
            d is not None,
            dt_bias is not None,
            _in_one_group(rows, heads, head_dim, group),
            WALK_TOKENS,
            rows,
            block,
        ),
        warps=8,
        stages=1,
    )


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """See :data:`fl_dispatch.ops.state_space.selective_state_update`. One launch."""
    out = x.new_empty(x.shape)
    requests, heads, head_dim = x.shape
    if not x.numel():
        return out
    columns, group = states.shape[3], heads // b.shape[1]
    block = power_of_two(columns)
    rows = min(max(1, TOKEN_TILE // block), power_of_two(heads * head_dim))
    slots = state_indices if state_indices.stride(0) == 1 else state_indices.contiguous()
    _update(
        (requests, -(-heads * head_dim // rows), 1),
        (x, dt, a, b, c, x if d is None else d, x if dt_bias is None else dt_bias, states, slots, out),
        (
            *x.stride(),
            *dt.stride(),
            *_strides_by_column(a),
            *b.stride(),
            *c.stride(),
            *_strides(d, dt_bias),
            *states.stride(),
            heads,
            head_dim,
            columns,
            group,
            a.dim() == 2,
            d is not None,
            dt_bias is not None,
            _in_one_group(rows, heads, head_dim, group),
            rows,
            block,
        ),
        stages=1,
    )
    return out


def _strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Those of vectors, 0 for one that is missing."""
    return tuple(0 if tensor is None else tensor.stride(0) for tensor in tensors)


def _strides_by_column(a: Tensor) -> tuple[int, int]:
    """Those of a head and of a column; a head's only decay is that of each column."""
    return a.stride(0), a.stride(1) if a.dim() == 2 else 0


def _in_one_group(rows: int, heads: int, head_dim: int, group: int) -> bool:
    """Whether the heads of every block of rows are of one group."""
    return heads == group or group * head_dim % rows == 0
