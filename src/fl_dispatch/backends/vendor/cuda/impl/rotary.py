"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import problem


def supports_rotary_embedding(query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, inplace: bool) -> bool | str:
    """Tensors of one dtype with heads side by side."""
    for name, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        if tensor is not None and (why := problem(name, tensor, like=query, contiguous=False)):
            return why
    for name, tensor in (("query", query), ("key", key)):
        if inplace and tensor is not None and tensor.stride()[1:] != (tensor.shape[2], 1):
            return f"the heads of {name} do not lie side by side (strides {tensor.stride()})"
    return True


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
    table, positions = _table(cos, sin, position_ids)
    heads = query.view(query.shape[0], -1)
    key_heads = None if key is None else key.view(key.shape[0], -1)
    torch.ops._C.rotary_embedding(positions, heads, key_heads, query.shape[-1], table, not rotary_interleaved)
    return query, key


def _table(cos: Tensor, sin: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's table, rows of cosines and sines side by side, and the row of each token."""
    half = cos.shape[-1]
    if cos.stride() == sin.stride() == (2 * half, 1) and sin.data_ptr() == cos.data_ptr() + half * cos.element_size():
        table = cos.as_strided((cos.shape[0], 2 * half), (2 * half, 1))  # hosts keep them so: nothing is copied
        return table, position_ids.to(torch.int64).contiguous()
    rows = torch.cat((cos[position_ids], sin[position_ids]), dim=-1)
    return rows, torch.arange(len(position_ids), device=position_ids.device)
