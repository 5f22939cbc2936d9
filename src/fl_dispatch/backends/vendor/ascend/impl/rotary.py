"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import problem

LARGEST_ROTARY = 894
"""Most rotated elements: even, and fewer than 896."""
MOST_HEADS = 999


def supports_rotary_embedding(query: Tensor, key: Tensor | None, cos: Tensor) -> bool | str:
    """Check for one dtype of query and key, and heads within the kernel's bounds."""
    for name, tensor in (("query", query), ("key", key)):
        if tensor is None:
            continue
        if why := problem("npu_rotary_mul", name, tensor, like=query):
            return why
        if tensor.shape[1] > MOST_HEADS:
            return f"{name} has {tensor.shape[1]} heads; npu_rotary_mul takes at most {MOST_HEADS}"
    if 2 * cos.shape[-1] > LARGEST_ROTARY:
        return f"{2 * cos.shape[-1]} elements are rotated; npu_rotary_mul rotates at most {LARGEST_ROTARY}"
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
    """See :data:`fl_dispatch.ops.rotary.rotary_embedding`. The angles are rounded to the dtype of ``query``."""
    import torch_npu

    if not query.shape[0]:
        return (query, key) if inplace else (query.clone(), None if key is None else key.clone())
    mode = "interleave" if rotary_interleaved else "half"
    cos, sin = (_rows(table, position_ids, rotary_interleaved).to(query.dtype) for table in (cos, sin))
    size = cos.shape[-1]

    def apply(x: Tensor) -> Tensor:
        part = x[..., :size].contiguous().unsqueeze(0)  # all tokens as one batch: [1, tokens, heads, size]
        rotated: Tensor = torch_npu.npu_rotary_mul(part, cos, sin, mode).squeeze(0)
        if inplace:
            x[..., :size] = rotated
            return x
        return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), dim=-1)

    return apply(query), None if key is None else apply(key)


def _rows(table: Tensor, position_ids: Tensor, interleaved: bool) -> Tensor:
    """Return each token's row for the kernel, ``[1, tokens, 1, rotary_dim]``; elements of a pair get the same value."""
    rows = table.index_select(0, position_ids)
    wide = rows.repeat_interleave(2, dim=-1) if interleaved else torch.cat((rows, rows), dim=-1)
    return wide[None, :, None]
