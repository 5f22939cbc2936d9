"""vLLM's method of quantized experts.

vLLM's own classes request a CUDA kernel, and process weights for that kernel. Here the parameters are those of
:mod:`fl_dispatch.hosting.quantized.stored_experts`, and vLLM's modular kernel calls an operator with unquantized rows,
so the exchange of tokens between ranks is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend, make_unquantized_moe_kernel

from fl_dispatch.hosting.quantized import experts
from fl_dispatch.hosting.quantized.stored_experts import Experts, GptqExperts, Parameters, Sizes

from ..layers.modular_experts import ExpertsFL, refusal
from . import refused


class QuantizedExpertsFL(ExpertsFL):
    """The experts of vLLM's modular kernel as one call of an operator for quantized weights."""

    fl_layer: Any
    fl_kernel: experts.QuantizedExperts

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
        routing = (topk_weights, topk_ids, activation, False, expert_map)
        self.fl_kernel.apply_experts(self.fl_layer, hidden_states, *routing, output)


class QuantizedMethod(FusedMoEMethodBase):
    """vLLM's method for a layer's kind of experts.

    Args:
        kernel: one layer's kernel.
        moe: vLLM's description of the layer.
    """

    def __init__(self, kernel: Experts, moe: Any) -> None:
        super().__init__(moe)
        if (reason := refusal(moe)) is not None:
            raise refused(f"{reason} in a mixture of experts")
        if lacking := kernel.fl_lacking():
            raise refused(f"these experts ({lacking})")
        self.fl_kernel = kernel

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        parameters, inner = Parameters(layer, extra_weight_attrs), intermediate_size_per_partition
        gates = 2 if self.moe.is_act_and_mul else 1
        sizes = Sizes(num_experts, hidden_size, inner, gates, self.moe.tp_size, params_dtype)
        if reason := self.fl_kernel.create_weights(parameters, sizes):
            raise refused(f"{reason} ({layer.layer_name})")
        # GPTQ's tools write biases for models without them.
        if self.moe.has_bias or isinstance(self.fl_kernel, GptqExperts):
            for name, columns, _ in sizes.weights():
                parameters.add(f"{name}_bias", torch.zeros(num_experts, columns, dtype=params_dtype))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the parameters to the operator's form, and build vLLM's kernel around the operator.

        vLLM sums over the ranks that share an expert, and its loader gives each rank the whole bias of ``w2``.
        """
        for name in ("w13_bias", "w2_bias") if isinstance(self.fl_kernel, GptqExperts) else ():
            if name not in layer._loaded_expert_biases:
                layer.register_parameter(name, None)
        if self.moe.tp_rank != 0 and (bias := getattr(layer, "w2_bias", None)) is not None:
            bias.data.zero_()
        self.fl_kernel.process_weights_after_loading(layer)
        if reason := self.fl_kernel.waiting(layer, self.moe.in_dtype, layer.activation.value):
            raise refused(f"these experts ({reason}; {layer.layer_name})")
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = make_unquantized_moe_kernel(
            quant_config=self.moe_quant_config,
            moe_config=self.moe,
            backend=UnquantizedMoeBackend.TRITON,
            experts_cls=QuantizedExpertsFL,
            routing_tables=layer._expert_routing_tables(),
        )
        found = self.moe_kernel.fused_experts
        found.fl_layer, found.fl_kernel = layer, self.fl_kernel

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        """Return a configuration without quantization, because vLLM's modular kernel need not know of it."""
        return FusedMoEQuantConfig.make()

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def supports_eplb(self) -> bool:
        return False

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Any:
        (w1, _), (w2, _) = (self.fl_kernel.weight_of(layer, name) for name in experts.NAMES)
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=w1,
            w2=w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
