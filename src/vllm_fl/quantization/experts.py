"""vLLM's methods of quantized experts, one class a kind of checkpoint.

vLLM's own classes register the parameters that its loader fills. Their ``__init__`` asks for one of CUDA's kernels, and
what they do after loading serves that kernel. Here both are ours: :mod:`fl_dispatch.hosting.quantized.experts` brings
the parameters into an operator's form, and vLLM's modular kernel calls it with rows that are not quantized, so the
exchange of tokens between ranks stays as it is.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend, make_unquantized_moe_kernel
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8,
    compressed_tensors_moe_w8a8_int8,
    compressed_tensors_moe_wna16,
)

from fl_dispatch.hosting.quantized import experts, orders

from ..layers.modular_experts import ExpertsFL, refusal

SCALES = ("weight_scale", "weight_scale_inv", "scales", "input_scale")
"""The ends of the names of weights' and inputs' scales."""


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


class QuantizedMethod:
    """The part that all kinds share."""

    fl_kernel: experts.QuantizedExperts
    moe: Any
    moe_kernel: Any

    def fl_begin(self, moe: Any, kernel: experts.QuantizedExperts) -> None:
        """Instead of vLLM's ``__init__``."""
        FusedMoEMethodBase.__init__(self, moe)
        if (reason := refusal(moe)) is not None:
            raise ValueError(f"vllm_fl does not support {reason} in a mixture of experts yet")
        if lacking := kernel.fl_lacking():
            raise ValueError(f"vllm_fl does not support these experts ({lacking}) yet")
        self.fl_kernel = kernel

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Scales that nobody loads are found by what they hold."""
        super().create_weights(layer, *args, **kwargs)  # type: ignore[misc]
        for name, parameter in layer.named_parameters(recurse=False):
            if name.endswith(SCALES):
                parameter.data.fill_(orders.UNSET)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring the parameters into the operator's form, and build vLLM's kernel around the operator.

        vLLM adds what the ranks that share an expert compute, and its loader gives each the whole bias of ``w2``.
        """
        if self.moe.tp_rank != 0 and (bias := getattr(layer, "w2_bias", None)) is not None:
            bias.data.zero_()
        self.fl_kernel.process_weights_after_loading(layer)
        if reason := self.fl_kernel.waiting(layer, self.moe.in_dtype, layer.activation.value):
            raise ValueError(f"vllm_fl does not support these experts ({reason}) yet")
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
        """Nothing is quantized as far as vLLM's modular kernel knows."""
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


class Fp8Method(QuantizedMethod, fp8.Fp8MoEMethod):
    """``fp8``, dynamic, static or in blocks."""

    def __init__(self, quant_config: Any, moe: Any) -> None:
        block = quant_config.weight_block_size
        if block and block[0] != block[1]:
            shape = f"{block[0]} x {block[1]}"
            raise ValueError(f"vllm_fl does not support experts quantized by 'fp8' in blocks of {shape} yet")
        self.fl_begin(moe, experts.Fp8BlockExperts(block[0]) if block else experts.Fp8Experts())
        self.quant_config, self.weight_block_size, self.moe_block_shape = quant_config, block, block
        # vLLM refuses elements that fill no whole blocks only where it does not make blocks smaller: here by one.
        self.block_quant, self.weight_scale_refine = block is not None, (1, 1)
        self.weight_scale_name = "weight_scale_inv" if block else "weight_scale"

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Ranks divide experts between blocks; with one rank the last block may be short."""
        inner, block = kwargs["intermediate_size_per_partition"], self.weight_block_size
        if block and inner % block[0] and self.moe.tp_size > 1:
            reason = f"experts whose {inner} elements on a rank are no whole number of blocks of {block[0]}"
            raise ValueError(f"vllm_fl does not support {reason} yet ({layer.layer_name})")
        super().create_weights(layer, *args, **kwargs)


class CompressedFp8Method(QuantizedMethod, compressed_tensors_moe_w8a8_fp8.CompressedTensorsW8A8Fp8MoEMethod):
    """``compressed-tensors`` W8A8 fp8, with a scale a column and a token."""

    def __init__(self, weights: Any, rows: Any, moe: Any) -> None:
        self.fl_begin(moe, experts.Fp8Experts())
        self.weight_quant, self.input_quant = weights, rows
        self.weight_block_size, self.block_quant, self.static_input_scales = None, False, False


class CompressedInt8Method(QuantizedMethod, compressed_tensors_moe_w8a8_int8.CompressedTensorsW8A8Int8MoEMethod):
    """``compressed-tensors`` W8A8 int8, likewise."""

    def __init__(self, weights: Any, rows: Any, moe: Any) -> None:
        self.fl_begin(moe, experts.Int8Experts())
        self.weight_quant, self.input_quant, self.static_input_scales = weights, rows, False


class PackedMethod(QuantizedMethod):
    """Weights packed in words, with scales of groups; a rank has whole words and groups."""

    fl_bits: int
    fl_group: int

    def fl_begin_packed(self, moe: Any, packing: experts.Packing, bits: int, group: int, zero_points: bool) -> None:
        """Instead of vLLM's ``__init__``; ``group``: its size, not positive for one scale a column."""
        self.fl_begin(moe, experts.PackedExperts(packing, bits, zero_points))
        self.fl_bits, self.fl_group = bits, group

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """A rank's parts must stand alone."""
        sizes = kwargs["hidden_size"], kwargs["intermediate_size_per_partition"]
        if reason := experts.indivisible(sizes, self.fl_bits, self.fl_group):
            raise ValueError(f"vllm_fl does not support {reason} yet ({layer.layer_name})")
        super().create_weights(layer, *args, **kwargs)


class CompressedPackedMethod(PackedMethod, compressed_tensors_moe_wna16.CompressedTensorsWNA16MoEMethod):
    """``compressed-tensors`` W4A16 and W8A16."""

    def __init__(self, weights: Any, moe: Any) -> None:
        bits, symmetric, group = weights.num_bits, weights.symmetric, weights.group_size or -1
        self.fl_begin_packed(moe, experts.COMPRESSED, bits, group, not symmetric)
        self.weight_quant, self.num_bits, self.symmetric, self.strategy = weights, bits, symmetric, weights.strategy
        self.packed_factor, self.group_size = Fraction(orders.WORD, bits), group


class GPTQMethod(PackedMethod, auto_gptq.AutoGPTQMoEMethod):
    """``gptq``, symmetric."""

    def __init__(self, quant_config: Any, moe: Any) -> None:
        bits, group = quant_config.weight_bits, quant_config.group_size
        self.fl_begin_packed(moe, experts.GPTQ, bits, group, zero_points=False)
        self.quant_config, self.input_dtype = quant_config, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """vLLM has made biases for checkpoints that have some."""
        for name in ("w13_bias", "w2_bias"):
            if name not in layer._loaded_expert_biases:
                layer.register_parameter(name, None)
        super().process_weights_after_loading(layer)


class AWQMethod(PackedMethod, auto_awq.AutoAWQMoEMethod):
    """``awq``, with zero points, in groups."""

    def __init__(self, quant_config: Any, moe: Any) -> None:
        if not quant_config.zero_point:
            raise ValueError("vllm_fl does not support experts quantized by 'awq' without zero points yet")
        if quant_config.group_size <= 0:
            raise ValueError("vllm_fl does not support experts quantized by 'awq' without groups yet")
        self.fl_begin_packed(moe, experts.AWQ, 4, quant_config.group_size, zero_points=True)
        self.quant_config, self.input_dtype = quant_config, None
