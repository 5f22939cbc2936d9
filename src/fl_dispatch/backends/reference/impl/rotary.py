"""Reference of the rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotated leading elements of each head, ``[tokens, heads, rotary_dim]``, in the dtype of ``cos``."""
    part = x[..., : 2 * cos.shape[-1]].to(cos.dtype)
    if interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    first, second = part.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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
    wide = torch.promote_types(torch.promote_types(query.dtype, cos.dtype), torch.float32)
    cos, sin = (table[position_ids].unsqueeze(1).to(wide) for table in (cos, sin))

    def apply(x: Tensor) -> Tensor:
        rotated = _rotated(x, cos, sin, rotary_interleaved).to(x.dtype)
        if not inplace:
            return torch.cat((rotated, x[..., rotated.shape[-1] :]), dim=-1).contiguous()
        x[..., : rotated.shape[-1]] = rotated
        return x

    return apply(query), None if key is None else apply(key)
