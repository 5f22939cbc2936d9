"""FlagGems' operators for mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_dispatch.backends.flaggems.library import gems

from .limits import problem


def supports_topk_softmax(router_logits: Tensor, topk: int, bias: Tensor | None) -> bool | str:
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


def supports_moe_sum(x: Tensor) -> bool | str:
    """Check for a half or single precision tensor."""
    return problem("x", x) or True


def moe_sum(x: Tensor, out: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.moe.moe_sum`."""
    if out is None:
        out = x.new_empty((x.shape[0], x.shape[2]))
    gems().moe_sum(x, out)
    return out
