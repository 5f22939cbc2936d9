"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import VECTOR, narrowed, problem, rounds, widened


def supports_rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, inplace: bool = True
) -> bool | str:
    """Tensors of one dtype with heads side by side."""
    # The kernel does not check this one itself: it runs over the end.
    if cos.shape[-1] % VECTOR:
        return f"half the rotary dimension, {cos.shape[-1]}, is not a multiple of {VECTOR}"
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
    head_dim = query.shape[-1]
    wide, wide_key = widened(query), None if key is None else widened(key)
    heads = wide.view(query.shape[0], -1)
    key_heads = None if wide_key is None else wide_key.view(query.shape[0], -1)
    torch.ops._C.rotary_embedding(positions, heads, key_heads, head_dim, table, not rotary_interleaved)
    return narrowed(wide, query), None if key is None or wide_key is None else narrowed(wide_key, key)


def _table(cos: Tensor, sin: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's table, rows of cosines and sines side by side, and the row of each token."""
    half = cos.shape[-1]
    side_by_side = (
        cos.stride() == sin.stride() == (2 * half, 1)
        and sin.data_ptr() == cos.data_ptr() + half * cos.element_size()
        and sin.untyped_storage().data_ptr() == cos.untyped_storage().data_ptr()
    )
    if side_by_side and rounds(cos.dtype):  # hosts keep them so: nothing is copied
        table = cos.as_strided((cos.shape[0], 2 * half), (2 * half, 1))
        return table, position_ids.to(torch.int64).contiguous()
    rows = torch.cat((cos[position_ids], sin[position_ids]), dim=-1)
    return widened(rows), torch.arange(len(position_ids))
