"""Selective state spaces: one launch for one token of each request, matrix products or a scan for prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher

from ..launch import power_of_two, shared_memory
from .state_space_kernels import _chunks, _token, _walk

TOKEN_TILE = 2048
"""Elements of the states that a program takes for one token."""
CHUNK = (64, 32, 4)
"""Tokens and elements of a head that a program takes, and warps, for up to ``LONG`` columns. Larger chunks do not fit
into a program's registers.
"""
CHUNK_LONG = (32, 16, 4)
"""``CHUNK`` for more columns."""
CHUNK_WIDE = (16, 16, 8)
"""``CHUNK`` for float32."""
LONG = 128
LARGEST_STATE = 256
"""Most columns of a state with which a chunk fits into a program."""
LEAST = 16
"""The shortest side of a matrix product."""
WALK_TOKENS = 32
"""Tokens that a scan takes at a time."""
WALK_TILE = 256
"""Elements of the states that a program takes with ``WALK_TOKENS``."""

_update = Launcher(_token)
_by_products = Launcher(_chunks)
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
    """See :data:`fl_dispatch.ops.state_space.selective_scan`. Does not wait for the device."""
    out, requests = x.new_empty(x.shape), len(state_indices)
    if not requests or not x.numel():
        return out
    (_, heads, head_dim), columns = x.shape, states.shape[3]
    group = heads // b.shape[1]
    slots, starts = state_indices.contiguous(), query_start_loc.contiguous()
    who = slots if has_state is None else has_state.contiguous().view(torch.uint8)
    skip, bias = x if d is None else d, x if dt_bias is None else dt_bias
    tensors = (x, dt, a, b, c, skip, bias, states, slots, starts, who, out)
    present = has_state is not None, d is not None, dt_bias is not None
    if a.dim() == 1 and x.dtype is not torch.float64 and columns <= LARGEST_STATE:
        wide = x.dtype is torch.float32
        block = max(LEAST, power_of_two(columns))
        chunk, rows, warps = CHUNK_WIDE if wide else CHUNK if block <= LONG else CHUNK_LONG
        rows = max(LEAST, min(power_of_two(head_dim), rows))
        stage, room = chunk * (2 * block + rows) * x.element_size(), shared_memory(x.device)
        _by_products(
            (heads * -(-head_dim // rows), requests, 1),
            tensors,
            (
                *_strides(x, dt, a, b, c, d, dt_bias, states), heads, head_dim, columns, group, *present,
                "ieee" if wide else "tf32", chunk, rows, block,  # half types ignore tf32
            ),
            sizes=(len(x),),
            warps=warps,
            stages=2 if not room or room > 3 * stage else 1,
        )  # fmt: skip
    else:
        block = power_of_two(columns)
        rows = max(1, WALK_TILE // block)
        _by_tokens(
            (-(-heads * head_dim // rows), requests, 1),
            tensors,
            (
                *_strides(x, dt, _by_column(a), b, c, d, dt_bias, states), heads, head_dim, columns, group, *present,
                _in_one_group(rows, heads, head_dim, group), WALK_TOKENS, rows, block,
            ),
            sizes=(len(x),),
            warps=8,
            stages=1,
        )  # fmt: skip
    return out


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
    """See :data:`fl_dispatch.ops.state_space.selective_state_update`. Makes one launch."""
    out = x.new_empty(x.shape)
    if not x.numel():
        return out
    (requests, heads, head_dim), columns = x.shape, states.shape[3]
    group, block = heads // b.shape[1], power_of_two(columns)
    rows = min(max(1, TOKEN_TILE // block), power_of_two(heads * head_dim))
    skip, bias = x if d is None else d, x if dt_bias is None else dt_bias
    _update(
        (requests, -(-heads * head_dim // rows), 1),
        (x, dt, a, b, c, skip, bias, states, state_indices.contiguous(), out),
        (
            *_strides(x, dt, _by_column(a), b, c, d, dt_bias, states), heads, head_dim, columns, group, a.dim() == 2,
            d is not None, dt_bias is not None, _in_one_group(rows, heads, head_dim, group), rows, block,
        ),
        stages=1,
    )  # fmt: skip
    return out


def _strides(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Strides of all tensors in order, 0 for a missing vector."""
    return tuple(stride for tensor in tensors for stride in ((0,) if tensor is None else tensor.stride()))


def _by_column(a: Tensor) -> Tensor:
    """Decays of columns; for heads with a single decay, a view with stride 0 along the columns."""
    return a if a.dim() == 2 else a[:, None].expand(-1, 2)


def _in_one_group(rows: int, heads: int, head_dim: int, group: int) -> bool:
    """Whether the heads of every block of rows belong to one group."""
    return heads == group or group * head_dim % rows == 0
