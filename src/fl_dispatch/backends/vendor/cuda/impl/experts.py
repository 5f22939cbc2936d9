"""Routing to experts, and the sum of their results."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .limits import problem

MOST_EXPERTS = 512
PADDING = "is_padding"
"""The last argument of the routers from vLLM 0.32 on, which has no default."""


def supports_topk(router_logits: Tensor, bias: Tensor | None) -> bool | str:
    """Check for contiguous logits of at most 512 experts and a bias in float32."""
    if bias is not None and bias.dtype is not torch.float32:
        return f"bias is {bias.dtype}, not float32"
    if router_logits.shape[-1] > MOST_EXPERTS:
        return f"{router_logits.shape[-1]} experts are more than {MOST_EXPERTS}"
    return problem("router_logits", router_logits) or True


def _results(router_logits: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate weights, expert numbers, and the kernel's third output, which is not used."""
    shape = (router_logits.shape[0], topk)
    weights = router_logits.new_empty(shape, dtype=torch.float32)
    return weights, torch.empty_like(weights, dtype=torch.int32), torch.empty_like(weights, dtype=torch.int32)


@functools.cache
def _router(name: str) -> tuple[Callable[..., None], tuple[None, ...]]:
    """Return an operator of the library, and its arguments after the ones that all versions share."""
    operator = getattr(torch.ops._moe_C, name)
    names = [argument.name for argument in operator.default._schema.arguments]
    return operator, (None,) * names.count(PADDING)


def topk_softmax(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_softmax`."""
    weights, experts, room = _results(router_logits, topk)
    if len(weights):
        route, padding = _router("topk_softmax")
        route(weights, experts, room, router_logits, renormalize, bias, *padding)
    return weights, experts


def topk_sigmoid(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_sigmoid`."""
    weights, experts, room = _results(router_logits, topk)
    if len(weights):
        route, padding = _router("topk_sigmoid")
        route(weights, experts, room, router_logits, renormalize, bias, 1.0, *padding)
    return weights, experts


def supports_moe_sum(x: Tensor, out: Tensor | None = None) -> bool | str:
    """Contiguous tensors."""
    if out is not None and (why := problem("out", out, like=x)):
        return why
    return problem("x", x) or True


def moe_sum(x: Tensor, out: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.moe.moe_sum`."""
    if out is None:
        out = x.new_empty((x.shape[0], x.shape[2]))
    if len(out):
        torch.ops._moe_C.moe_sum(x, out)
    return out
