"""The experts of vLLM's modular kernel over the operator ``fused_moe``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from fl_dispatch.ops.moe import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS


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
        return (0,), (0,), (tokens, hidden)  # implementations have their own workspace

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
        if apply_router_weight_on_input:  # vLLM's prepare step has applied it
            topk_weights = torch.ones_like(topk_weights)
        self.fl_compute(w1, w2, hidden_states, topk_weights, topk_ids, activation.value, expert_map, output)

    def fl_compute(
        self,
        w1: Tensor,
        w2: Tensor,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: str,
        expert_map: Tensor | None,
        output: Tensor,
    ) -> None:
        """Call the operator, which writes ``output``."""
        biases = (self.w1_bias, self.w2_bias)
        self.fl_call(hidden_states, w1, w2, topk_weights, topk_ids, activation, False, expert_map, *biases, output)


def refusal(moe: FusedMoEConfig) -> str | None:
    """Return why these experts cannot run here, or ``None``."""
    if any(value is not None for value in (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)):
        return "experts with a limited or scaled SwiGLU"
    supported, reason = ExpertsFL.is_supported_config(ExpertsFL, moe, None, None, mk.FusedMoEActivationFormat.Standard)
    return None if supported else str(reason).removeprefix("kernel does not support ")
