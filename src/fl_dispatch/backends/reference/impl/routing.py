"""References of the routing operators."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_dispatch.ops.routing import SMALLEST_SUM


def scores(router_logits: Tensor, scoring_func: str) -> Tensor:
    """The experts' scores, at least float32."""
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


def best(scores: Tensor, topk: int, renormalize: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and numbers of the experts with the best scores."""
    return _result(scores, scores if bias is None else scores + bias, topk, renormalize)


def best_of_groups(
    scores: Tensor, topk: int, num_groups: int, topk_group: int, renormalize: bool, factor: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same of the experts in the best groups."""
    groups = (len(scores), num_groups, scores.shape[-1] // num_groups)
    grouped = (scores if bias is None else scores + bias).view(groups)
    values = grouped.amax(dim=-1) if bias is None else grouped.topk(2, dim=-1).values.sum(dim=-1)
    inside = torch.zeros_like(values).scatter(-1, values.topk(topk_group, dim=-1).indices, 1.0) > 0
    chosen = grouped.masked_fill(~inside.unsqueeze(-1), float("-inf")).flatten(-2)
    return _result(scores, chosen, topk, renormalize, factor)


def topk_softmax(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_softmax`."""
    return best(scores(router_logits, "softmax"), topk, renormalize, bias)


def topk_sigmoid(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_sigmoid`."""
    return best(scores(router_logits, "sigmoid"), topk, renormalize, bias)


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
    found = scores(router_logits, scoring_func)
    return best_of_groups(found, topk, num_expert_group, topk_group, renormalize, routed_scaling_factor, bias)
