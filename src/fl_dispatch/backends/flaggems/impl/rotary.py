"""FlagGems' rotary embedding."""

from __future__ import annotations

from torch import Tensor

from fl_dispatch.backends.flaggems.library import gems

from .limits import problem


def supports_rotary_embedding(query: Tensor, key: Tensor | None, cos: Tensor) -> bool | str:
    """Check for a key, and for heads that are rotated as a whole."""
    if key is None:
        return "there is no key"
    for name, tensor in (("query", query), ("key", key)):
        if why := problem(name, tensor):
            return why
    if 2 * cos.shape[-1] != query.shape[-1]:
        return f"only {2 * cos.shape[-1]} of {query.shape[-1]} elements are rotated"
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
    rotated: tuple[Tensor, Tensor] = gems().apply_rotary_pos_emb(
        query, key, cos, sin, position_ids, rotary_interleaved, inplace
    )
    return (query, key) if inplace else rotated  # FlagGems returns other views of the same memory
