"""Mixture of experts in vLLM: its modular kernel with our experts, and its routers over our routing operators.

vLLM splits such a layer into a runner, which owns the router and the collectives, and a method, which owns the weights
and a kernel made of "prepare and finalize" and "experts". On an out-of-tree platform it has neither experts nor, for
most models, a router that runs: those are compiled CUDA code. Here the method gets :class:`ExpertsFL`, the runner a
:class:`RouterFL`. Everything else stays vLLM's: shared experts, expert maps, the exchange of tokens between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulatorRouter
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from fl_dispatch.logger_manager import get_logger
from fl_dispatch.ops.moe import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS
from fl_dispatch.settings import get_settings

from .forwards import DispatchedLayer

logger = get_logger(__name__)

# -- experts ----------------------------------------------------------------------------------------------------------


class ExpertsFL(mk.FusedMoEExpertsModular):
    """The experts of vLLM's modular kernel as one call of the operator ``fused_moe``."""

    fl_call: Callable[..., Tensor]

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation.value in (*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS)

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.use_all2all_kernels or moe_parallel_config.use_ag_rs_all2all_kernels

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True  # the core then admits only implementations that declare it

    def workspace_shapes(  # vLLM passes these by position
        self, tokens: int, rows: int, hidden: int, *args: Any, **kwargs: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (tokens, hidden)  # an implementation has a workspace of its own

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        **kwargs: Any,  # scales and workspaces; vLLM passes everything by name
    ) -> None:
        if apply_router_weight_on_input:  # vLLM's prepare step has done it
            topk_weights = torch.ones_like(topk_weights)
        biases = (self.w1_bias, self.w2_bias)
        self.fl_call(
            hidden_states, w1, w2, topk_weights, topk_ids, activation.value, False, expert_map, *biases, output
        )


def refusal(moe: FusedMoEConfig) -> str | None:
    """Why these experts cannot run here, or ``None``."""
    if any(value is not None for value in (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)):
        return "experts with a limited or scaled SwiGLU"
    supported, reason = ExpertsFL.is_supported_config(ExpertsFL, moe, None, None, mk.FusedMoEActivationFormat.Standard)
    return None if supported else str(reason).removeprefix("kernel does not support ")


class ExpertsLayer(DispatchedLayer):
    """``UnquantizedFusedMoEMethod``: builds vLLM's modular kernel around :class:`ExpertsFL`.

    vLLM calls the kernel in either of its forwards, so ``custom_ops`` does not switch ours off.
    """

    fl_operator = "fused_moe"
    fl_traced = False
    moe_kernel: mk.FusedMoEKernel | None

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        if (reason := refusal(moe)) is not None:
            raise ValueError(f"vllm_fl does not support {reason} in a mixture of experts yet")
        # vLLM leaves the weights as they were loaded for this backend, and builds the kernel from experts_cls.
        self.unquantized_backend, self.experts_cls = UnquantizedMoeBackend.TRITON, ExpertsFL

    def _init_moe_kernel(self, layer: Any) -> None:
        super()._init_moe_kernel(layer)  # type: ignore[misc]
        self._hand_over()

    def fl_bind(self, scope: str | None) -> None:
        super().fl_bind(scope)
        self._hand_over()

    def _hand_over(self) -> None:
        if self.moe_kernel is not None:
            self.moe_kernel.fused_experts.fl_call = self.fl_call

    def fl_scope(self, prefix: str) -> str:
        return prefix.removesuffix(".routed_experts.quant_method")

    def fl_runs(self) -> bool:
        return True


# -- routing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """What a router of vLLM computes: ``operator(router_logits, *arguments)``, and the weights times ``factor``."""

    operator: str
    arguments: tuple[Any, ...]
    factor: float = 1.0


def _plain(router: FusedTopKRouter) -> Route:
    return Route(f"topk_{router.scoring_func}", (router.top_k, router.renormalize))


def _biased(router: FusedTopKBiasRouter) -> Route:
    if router.scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(f"routing by '{router.scoring_func}'")
    if router._hash_indices_table is not None or router.bias_vl is not None:
        raise ValueError("routing by token ids")
    if router.num_fused_shared_experts:
        raise ValueError("shared experts among the routed ones")
    arguments = (router.top_k, router.renormalize, router.e_score_correction_bias)
    return Route(f"topk_{router.scoring_func}", arguments, router.routed_scaling_factor)


def _grouped(router: GroupedTopKRouter) -> Route:
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
"""Routers of vLLM that call plain Python: a model's own function, and made-up routing to measure with."""


def route(router: Any) -> Route | None:
    """The call that gives what a router of vLLM gives; ``None`` for one that stays: plain Python, or a plugin's.

    Raises:
        ValueError: a kind of routing that there is no operator for; the message names it.
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


class RunnerLayer(DispatchedLayer):
    """``MoERunner``: its router goes through the operator that computes the same. Without one it is native."""

    fl_operators: ClassVar = ("topk_softmax", "topk_sigmoid", "grouped_topk")
    fl_operator = ""
    fl_traced = False
    router: Any

    def __init__(self, *args: Any, layer_name: str, router: Any, **kwargs: Any) -> None:
        try:
            found = route(router)
        except ValueError as error:
            raise ValueError(f"vllm_fl does not support {error} in a mixture of experts yet ({layer_name})") from error
        if found is not None:
            if not get_settings().registers("MoERunner", found.operator):
                raise ValueError(
                    f"the router of {layer_name} needs '{found.operator}', which the lists of out-of-tree layers leave "
                    "out; vLLM's own is compiled CUDA code"
                )
            self.fl_operator, router = found.operator, RouterFL(router, found)
        super().__init__(*args, layer_name=layer_name, router=router, **kwargs)

    def fl_bind(self, scope: str | None) -> None:
        if self.fl_operator:
            super().fl_bind(scope)
            self.router.fl_call = self.fl_call

    def fl_runs(self) -> bool:
        return bool(self.fl_operator)
