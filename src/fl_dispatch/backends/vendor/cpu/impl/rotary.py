"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled_by_vllm import rotary_problem, rotary_table
from .limits import VECTOR, narrowed, rounds, widened


def supports_rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, inplace: bool = True
) -> bool | str:
    """Check for one dtype and adjacent heads."""
    # The kernel does not check this and would run past the end.
    if cos.shape[-1] % VECTOR:
        return f"half the rotary dimension, {cos.shape[-1]}, is not a multiple of {VECTOR}"
    return rotary_problem("cpu", query, key, cos, sin, inplace) or True


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """See :data:`fl_dispatch.ops.rotary.rotary_embedding`."""
    if not inplace:
        query = query.clone(memory_format=torch.contiguous_format)
        key = None if key is None else key.clone(memory_format=torch.contiguous_format)
    if query.shape[0] == 0:
        return query, key
    table, positions = rotary_table(cos, sin, position_ids, rounds(cos.dtype))
    head_dim = query.shape[-1]
    wide, wide_key = widened(query), None if key is None else widened(key)
    heads = wide.view(query.shape[0], -1)
    key_heads = None if wide_key is None else wide_key.view(query.shape[0], -1)
    torch.ops._C.rotary_embedding(positions, heads, key_heads, head_dim, widened(table), not rotary_interleaved)
    return narrowed(wide, query), None if key is None or wide_key is None else narrowed(wide_key, key)
