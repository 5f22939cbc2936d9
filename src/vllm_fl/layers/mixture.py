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

from typing import TYPE_CHECKING, Any

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

    def _maybe_apply_routed_scale_to_output(
        self, shared_output: Tensor | None, fused_output: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        if self.fl_multiplies:
            return shared_output, fused_output.mul_(self.routed_scaling_factor)
        scaled: tuple[Tensor | None, Tensor]
        scaled = super()._maybe_apply_routed_scale_to_output(shared_output, fused_output)  # type: ignore[misc]
        return scaled
