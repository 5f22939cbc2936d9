"""Mixture of experts in vLLM: its modular kernel with our experts, and its routers over our routing operators.

vLLM splits such a layer into a runner, which owns the router and the collectives, and a method, which owns the weights
and a kernel made of "prepare and finalize" and "experts". On an out-of-tree platform it has no experts, and for most
models no router that runs, because these are compiled CUDA code. Here the method gets experts of
:mod:`~vllm_fl.layers.modular_experts`, the runner a router of :mod:`~vllm_fl.layers.routers` and the stream of
:mod:`~vllm_fl.layers.shared_experts`. Everything else stays vLLM's: the computation of shared experts, expert maps, the
exchange of tokens between ranks.

Importing this module imports nothing of vLLM, like all modules with rows in :mod:`vllm_fl.layers.classes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fl_dispatch.devices import detect_device
from fl_dispatch.settings import get_settings

from ..compat import models
from .forwards import DispatchedLayer

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel


class ExpertsLayer(DispatchedLayer):
    """``UnquantizedFusedMoEMethod``: builds vLLM's modular kernel around ``ExpertsFL``.

    vLLM calls the kernel in either of its forwards, so ``custom_ops`` does not switch ours off.
    """

    fl_operator = "fused_moe"
    fl_traced = False
    fl_weights = ("w13_weight", "w2_weight")
    moe_kernel: FusedMoEKernel | None

    def __init__(self, moe: FusedMoEConfig) -> None:
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

        from .modular_experts import ExpertsFL, refusal

        super().__init__(moe)
        if (reason := refusal(moe)) is not None:
            raise ValueError(f"vllm_fl does not support {reason} in a mixture of experts yet")
        # vLLM leaves the weights as loaded for this backend, and builds the kernel from experts_cls.
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

    def fl_compute(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Return the modular kernel's result in a rank without exchange of tokens, in a form for Dynamo."""
        assert self.moe_kernel is not None
        experts = self.moe_kernel.fused_experts
        how = (layer.activation.value, layer.apply_router_weight_on_input, layer.expert_map)
        found: Tensor = self.fl_call(
            x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids, *how, experts.w1_bias, experts.w2_bias, None
        )
        return found

    @staticmethod
    def fl_scope(prefix: str) -> str:
        return prefix.removesuffix(".routed_experts.quant_method")

    def fl_runs(self) -> bool:
        return True


class RunnerLayer(DispatchedLayer):
    """``MoERunner``: its router goes through the equivalent operator. Without one the router stays vLLM's."""

    fl_choices = ("topk_softmax", "topk_sigmoid", "grouped_topk")
    fl_operator = ""
    fl_traced = False
    fl_multiplies: bool = False
    """Whether to scale the routed experts, because vLLM's runner would divide the shared ones instead."""
    router: Any
    routed_scaling_factor: float
    _shared_experts: Any
    gate: Any
    routed_experts: Any
    moe_config: Any
    fl_opaque: Callable[..., Any]
    """vLLM's operator, which compiled code does not look into."""

    def __init__(self, *args: Any, layer_name: str, router: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        from .routers import RouterFL, route
        from .shared_experts import on_separate_stream

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
        self._shared_experts = on_separate_stream(self._shared_experts)
        model = get_current_vllm_config().model_config
        self.fl_multiplies = model is not None and models.is_unbalanced(model)

    def fl_bind(self, scope: str | None) -> None:
        if self.fl_operator:
            super().fl_bind(scope)
            self.router.fl_call = self.fl_call

    def fl_runs(self) -> bool:
        return bool(self.fl_operator)

    def _select_forward(self) -> Callable[..., Any]:
        self.fl_opaque = super()._select_forward()  # type: ignore[misc]
        return self.fl_opaque if detect_device().accelerator else self.fl_enter

    def fl_enter(self, hidden_states: Tensor, router_logits: Tensor, *others: Any) -> Any:
        """Run the router and the experts; compiled code contains both if the layer does no more than that."""
        if not (torch.compiler.is_compiling() and self.fl_traces()):
            return self.fl_opaque(hidden_states, router_logits, *others)
        if self.gate is not None:
            router_logits, _ = self.gate(hidden_states)
        weights, ids = self.router.select_experts(hidden_states=hidden_states, router_logits=router_logits)
        experts = self.routed_experts
        return experts.quant_method.fl_compute(experts, hidden_states, weights, ids)

    def fl_traces(self) -> bool:
        """Whether Dynamo can trace the layer: plain weights, no shared experts, no reader of the chosen experts, and no
        exchange of tokens between ranks.
        """
        ranks = self.moe_config
        return (
            self.fl_runs()
            and isinstance(self.routed_experts.quant_method, ExpertsLayer)
            and self._shared_experts is None
            and self.router.capture_fn is None
            and self.router.eplb_state is None
            and (ranks.dp_size, ranks.pcp_size, ranks.is_sequence_parallel) == (1, 1, False)
            and not ranks.moe_parallel_config.use_all2all_kernels
        )

    def _maybe_apply_routed_scale_to_output(
        self, shared_output: Tensor | None, fused_output: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        if self.fl_multiplies:
            return shared_output, fused_output.mul_(self.routed_scaling_factor)
        scaled: tuple[Tensor | None, Tensor]
        scaled = super()._maybe_apply_routed_scale_to_output(shared_output, fused_output)  # type: ignore[misc]
        return scaled
