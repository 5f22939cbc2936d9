"""vLLM's routers over our routing operators; :mod:`vllm_fl.layers.mixture` installs them in its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulatorRouter
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter


@dataclass(frozen=True)
class Route:
    """A router's computation: ``operator(router_logits, *arguments)``, and the weights times ``factor``."""

    operator: str
    arguments: tuple[Any, ...]
    factor: float = 1.0


def _plain(router: FusedTopKRouter) -> Route:
    return Route(f"topk_{router.scoring_func}", (router.top_k, router.renormalize))


def _biased(router: FusedTopKBiasRouter) -> Route:
    """Return the route with a bias for the choice.

    Raises:
        ValueError: the router does what no operator does.
    """
    if router.scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(f"routing by '{router.scoring_func}'")
    if router._hash_indices_table is not None or router.bias_vl is not None:
        raise ValueError("routing by token ids")
    if router.num_fused_shared_experts:
        raise ValueError("shared experts among the routed ones")
    arguments = (router.top_k, router.renormalize, router.e_score_correction_bias)
    return Route(f"topk_{router.scoring_func}", arguments, router.routed_scaling_factor)


def _grouped(router: GroupedTopKRouter) -> Route:
    """Return the route by groups of experts.

    Raises:
        ValueError: the router does what no operator does.
    """
    groups, experts = router.num_expert_group, router.global_num_experts
    if experts <= groups or experts % groups:
        raise ValueError(f"{experts} experts in {groups} groups")
    if router.num_fused_shared_experts:
        raise ValueError("shared experts among the routed ones")
    arguments = (router.top_k, groups, router.topk_group, router.renormalize, router.scoring_func)
    return Route("grouped_topk", (*arguments, router.routed_scaling_factor, router.e_score_correction_bias))


def _zero_experts(router: ZeroExpertRouter) -> Route:
    raise ValueError("experts that compute nothing")


_ROUTES: dict[type, Callable[[Any], Route]] = {
    FusedTopKRouter: _plain,
    FusedTopKBiasRouter: _biased,
    GroupedTopKRouter: _grouped,
    ZeroExpertRouter: _zero_experts,
}


_PYTHON_ROUTERS = (CustomRoutingRouter, RoutingSimulatorRouter)
"""Routers of vLLM that call plain Python: a model's own function, and simulated routing for measurements."""


def route(router: Any) -> Route | None:
    """Return the call with the result of vLLM's router; ``None`` for plain Python or a plugin's router, which stays.

    Raises:
        ValueError: no operator has this kind of routing; the message names it.
    """
    kind = type(router)
    if (find := _ROUTES.get(kind)) is not None:
        return find(router)
    if kind not in _PYTHON_ROUTERS and kind.__module__.partition(".")[0] == "vllm":
        raise ValueError(f"routing by vLLM's {kind.__name__}")  # it may be compiled CUDA code
    return None


class RouterFL(BaseRouter):
    """A router of vLLM over one of our operators."""

    fl_call: Callable[..., tuple[Tensor, Tensor]]

    def __init__(self, replaced: BaseRouter, found: Route) -> None:
        super().__init__(replaced.top_k, replaced.global_num_experts, replaced.eplb_state)
        self.capture_fn = replaced.capture_fn
        self.replaced, self.route = replaced, found

    @property
    def routing_method_type(self) -> RoutingMethodType:
        return self.replaced.routing_method_type

    def _compute_routing(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        weights, ids = self.fl_call(router_logits, *self.route.arguments)
        return (weights if self.route.factor == 1.0 else weights * self.route.factor), ids
