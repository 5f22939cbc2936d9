"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled_by_vllm import rotary_problem, rotary_table


def supports_rotary_embedding(query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, inplace: bool) -> bool | str:
    """Check for one dtype and adjacent heads."""
    return rotary_problem("cuda", query, key, cos, sin, inplace) or True


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
    table, positions = rotary_table(cos, sin, position_ids)
    heads = query.view(query.shape[0], -1)
    key_heads = None if key is None else key.view(key.shape[0], -1)
    torch.ops._C.rotary_embedding(positions, heads, key_heads, query.shape[-1], table, not rotary_interleaved)
    return query, key
