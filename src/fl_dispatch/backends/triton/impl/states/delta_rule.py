"""The gated delta rule: two launches for prompts in chunks, one launch for one token of each request."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.recurrent import LEAST_LENGTH

from ..launch import power_of_two, processors, shared_memory
from . import delta_rule_kernels
from .sequence_search import steps_of_search

ROOM = 160 << 10
"""Fewest bytes of shared memory that fit two stages of the largest chunks."""
TOKEN = (32, 4)
"""Columns of a state and warps for one token."""
TOKEN_FEW = (8, 1)
"""``TOKEN`` for launches that would otherwise have few programs."""


class Form(NamedTuple):
    """Form of the computation of prompts.

    Args:
        kind, operand: the operands' type in products, for PyTorch and for Triton.
        unit: whether keys, rather than the other operand, are divided by the keys' length before a product.
        precision: of float32 products.
        chunk: rows of a chunk.
        columns: columns of a state in one program.
        warps, stages: of both kernels.
    """

    kind: torch.dtype
    operand: Any
    unit: bool
    precision: str
    chunk: int
    columns: int
    warps: int
    stages: int


LARGE = Form(torch.bfloat16, tl.bfloat16, False, "tf32", 64, 32, 4, 2)
SMALL = Form(torch.bfloat16, tl.bfloat16, False, "tf32", 32, 16, 4, 1)
HALF = Form(torch.float16, tl.float16, True, "ieee", 32, 16, 4, 1)
"""Form with unit keys, because a correction divided by a short key's length could exceed the range of float16."""
WIDE = Form(torch.float32, tl.float32, False, "ieee", 16, 16, 8, 1)


def form(dtype: torch.dtype, device: torch.device) -> Form:
    """Return the form for keys of a type on a device."""
    if dtype is torch.bfloat16:
        return LARGE if shared_memory(device) >= ROOM else SMALL
    return HALF if dtype is torch.float16 else WIDE


_prepare = Launcher(delta_rule_kernels._prepare)
_advance = Launcher(delta_rule_kernels._advance)
_update = Launcher(delta_rule_kernels._update)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    has_state: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """See :data:`fl_dispatch.ops.recurrent.gated_delta_rule`. Declines float64."""
    _check(value)
    (rows, key_heads, dim), (_, heads, dim_v) = key.shape, value.shape
    out, requests = value.new_empty(value.shape), len(state_indices)
    if not rows or not requests or not value.numel():
        return out
    kind, operand, unit, precision, chunk, columns, warps, stages = form(
        torch.promote_types(query.dtype, key.dtype), key.device
    )
    chunks = -(-rows // chunk)
    block, block_v = max(16, power_of_two(dim)), max(16, min(columns, power_of_two(dim_v)))
    corrections, outputs = (
        torch.empty((chunks * chunk, heads, chunk), dtype=kind, device=key.device) for _ in range(2)
    )
    decays = torch.empty((chunks * chunk, heads), dtype=torch.float32, device=key.device)
    lengths = torch.empty((2, chunks * chunk, key_heads), dtype=torch.float32, device=key.device)
    state_indices, query_start_loc = state_indices.contiguous(), query_start_loc.contiguous()
    _prepare(
        (heads, chunks, 1),
        (
            query, key, a, b, a_log.contiguous(), dt_bias.contiguous(), query_start_loc,
            corrections, outputs, decays, lengths[0], lengths[1], out,
        ),
        (
            *query.stride(), *key.stride(), a.stride(1), b.stride(1), scale, heads, key_heads, dim, dim_v, LEAST_LENGTH,
            chunk, chunk.bit_length() - 1, block, power_of_two(dim_v), operand, precision,
        ),
        sizes=(requests, steps_of_search(requests), rows, a.stride(0), b.stride(0)),
        warps=warps,
        stages=1,
    )  # fmt: skip
    who = query_start_loc if has_state is None else has_state.contiguous().view(torch.int8)
    _advance(
        (-(-dim_v // block_v), heads, requests),
        (
            query, key, value, states, state_indices, query_start_loc, who,
            corrections, outputs, decays, lengths[0], lengths[1], out,
        ),
        (
            *query.stride(), *key.stride(), *value.stride(), *states.stride(), scale, heads, key_heads, dim, dim_v,
            has_state is not None, chunk, block, block_v, operand, unit, precision,
        ),
        warps=warps,
        stages=stages,
    )  # fmt: skip
    return out


def gated_delta_rule_update(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_indices: Tensor,
    scale: float = 1.0,
) -> Tensor:
    """See :data:`fl_dispatch.ops.recurrent.gated_delta_rule_update`. Declines float64."""
    _check(value)
    (_, key_heads, dim), (requests, heads, dim_v) = key.shape, value.shape
    out = value.new_empty(value.shape)
    if not out.numel():
        return out
    columns, warps = TOKEN
    if requests * heads * -(-dim_v // columns) < 2 * processors(value.device):
        columns, warps = TOKEN_FEW
    columns = min(columns, power_of_two(dim_v))
    _update(
        (-(-dim_v // columns), heads, requests),
        (query, key, value, a, b, a_log.contiguous(), dt_bias.contiguous(), states, state_indices.contiguous(), out),
        (
            *query.stride(), *key.stride(), *value.stride(), a.stride(1), b.stride(1), *states.stride(),
            scale, heads, key_heads, dim, dim_v, LEAST_LENGTH, power_of_two(dim), columns,
        ),
        sizes=(a.stride(0), b.stride(0)),
        warps=warps,
    )  # fmt: skip
    return out


def _check(value: Tensor) -> None:
    if value.dtype is torch.float64:
        raise NotSupported("float64")
