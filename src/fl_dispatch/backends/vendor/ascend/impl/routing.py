"""Routing: the kernel chooses the experts, in float32, and this module computes the weights from the scores.

Editions of the kernel's documentation agree about the choice of experts, but disagree about whether and by which scores
the kernel renormalizes its weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_dispatch.ops.routing import SMALLEST_SUM

from .limits import problem

MOST_EXPERTS = 2048
ALIGNMENT = 32
"""Multiple to which a group's size is rounded up when it counts towards ``MOST_EXPERTS``."""
SCORING = {"softmax": 0, "sigmoid": 1}
"""The kernel's numbers of scoring functions."""


def supports_topk(router_logits: Tensor) -> bool | str:
    """Check for three to 2,048 experts."""
    return _group_problem(router_logits, 1) or True


def supports_grouped_topk(router_logits: Tensor, num_expert_group: int, scoring_func: str) -> bool | str:
    """Check for three or more experts a group, and up to 2,048 experts."""
    if scoring_func not in SCORING:
        return f"scoring_func is {scoring_func!r}, not 'softmax' or 'sigmoid'"
    return _group_problem(router_logits, num_expert_group) or True


def _group_problem(router_logits: Tensor, groups: int) -> str:
    size = router_logits.shape[-1] // groups
    if size < 3:
        return f"a group has {size} experts; npu_moe_gating_top_k takes 3 or more"
    if (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT * groups > MOST_EXPERTS:
        return f"{groups} groups of {size} experts are too many for npu_moe_gating_top_k"
    return problem("npu_moe_gating_top_k", "router_logits", router_logits)


def topk_softmax(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_softmax`."""
    return grouped_topk(router_logits, topk, 1, 1, renormalize, "softmax", 1.0, bias)


def topk_sigmoid(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_sigmoid`."""
    return grouped_topk(router_logits, topk, 1, 1, renormalize, "sigmoid", 1.0, bias)


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
    import torch_npu

    logits = router_logits.float()
    if not logits.shape[0]:
        return logits.new_empty(0, topk), logits.new_empty(0, topk, dtype=torch.int32)
    _, ids, _ = torch_npu.npu_moe_gating_top_k(
        logits,
        topk,
        bias=None if bias is None else bias.float(),
        k_group=topk_group,
        group_count=num_expert_group,
        group_select_mode=0 if bias is None else 1,  # score a group by its best expert, or by the sum of its two best
        renorm=0,
        norm_type=SCORING[scoring_func],
        out_flag=False,
        routed_scaling_factor=1.0,
        eps=SMALLEST_SUM,
    )
    scores = logits.softmax(dim=-1) if scoring_func == "softmax" else logits.sigmoid()
    weights = scores.gather(-1, ids.long())
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return (weights if routed_scaling_factor == 1.0 else weights * routed_scaling_factor), ids
