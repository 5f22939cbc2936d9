"""One function an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_dispatch.backends.flaggems.library import gems

from .limits import problem


def supports_activation(x: Tensor, *_: Any, **__: Any) -> bool | str:
    """A half or single precision tensor."""
    return problem("x", x) or True


def silu_and_mul(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
    result: Tensor = gems().silu_and_mul(*x.chunk(2, dim=-1))
    return result.contiguous()  # it keeps the order of swapped batch dimensions


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul`."""
    result: Tensor = gems().gelu_and_mul(*x.chunk(2, dim=-1), approximate)
    return result.contiguous()


def supports_rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> bool | str:
    """A weight; with a residual, contiguous tensors of one dtype."""
    if weight is None:
        return "there is no weight"
    for name, tensor in (("x", x), ("residual", residual)):
        if tensor is not None and (why := problem(name, tensor, contiguous=residual is not None)):
            return why
    if residual is not None and residual.dtype is not x.dtype:
        return f"residual is {residual.dtype}, x {x.dtype}"
    return True


def rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.normalization.rms_norm`. With a residual both tensors are overwritten and returned."""
    shape = [x.shape[-1]]
    if residual is not None:
        gems().fused_add_rms_norm(x, residual, shape, weight, epsilon)
        return x, residual
    result: Tensor = gems().rms_norm(x, shape, weight, epsilon)
    return result


def supports_rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> bool | str:
    """A key, and heads that are rotated as a whole."""
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
    return (query, key) if inplace else rotated  # it returns other views of the same memory


def supports_topk_softmax(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> bool | str:
    """Contiguous logits without a bias, and at most 32 experts a token."""
    if bias is not None:
        return "FlagGems has no bias"
    if topk > 32:
        return f"{topk} experts a token are more than 32"
    return problem("router_logits", router_logits, contiguous=True) or True


def topk_softmax(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_softmax`."""
    weights = router_logits.new_empty((router_logits.shape[0], topk), dtype=torch.float32)
    experts, room = torch.empty_like(weights, dtype=torch.int32), torch.empty_like(weights, dtype=torch.int32)
    gems().topk_softmax(weights, experts, room, router_logits, renormalize)
    return weights, experts


def supports_moe_sum(x: Tensor, out: Tensor | None = None) -> bool | str:
    """A half or single precision tensor."""
    return problem("x", x) or True


def moe_sum(x: Tensor, out: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.moe.moe_sum`."""
    if out is None:
        out = x.new_empty((x.shape[0], x.shape[2]))
    gems().moe_sum(x, out)
    return out
