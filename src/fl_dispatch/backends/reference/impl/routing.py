"""References of the routing operators."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_dispatch.ops.routing import SMALLEST_SUM


def _scores(router_logits: Tensor, scoring_func: str) -> Tensor:
    wide = router_logits.to(torch.promote_types(router_logits.dtype, torch.float32))
    if scoring_func == "softmax":
        return wide.softmax(dim=-1)
    if scoring_func == "sigmoid":
        return wide.sigmoid()
    raise NotImplementedError(f"scoring_func '{scoring_func}'")


def _result(scores: Tensor, chosen: Tensor, topk: int, renormalize: bool, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Weights and numbers of the experts that are best by ``chosen``."""
    ids = chosen.topk(topk, dim=-1).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return (weights * factor).float(), ids.int()


def topk_softmax(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_softmax`."""
    scores = _scores(router_logits, "softmax")
    return _result(scores, scores if bias is None else scores + bias, topk, renormalize)


def topk_sigmoid(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_sigmoid`."""
    scores = _scores(router_logits, "sigmoid")
    return _result(scores, scores if bias is None else scores + bias, topk, renormalize)


def grouped_topk(
    router_logits: Tensor,
    topk: int,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool = False,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.grouped_topk`."""
    scores = _scores(router_logits, scoring_func)
    groups = (len(scores), num_expert_group, scores.shape[-1] // num_expert_group)
    grouped = (scores if bias is None else scores + bias).view(groups)
    values = grouped.amax(dim=-1) if bias is None else grouped.topk(2, dim=-1).values.sum(dim=-1)
    inside = torch.zeros_like(values).scatter(-1, values.topk(topk_group, dim=-1).indices, 1.0) > 0
    chosen = grouped.masked_fill(~inside.unsqueeze(-1), float("-inf")).flatten(-2)
    return _result(scores, chosen, topk, renormalize, routed_scaling_factor)
