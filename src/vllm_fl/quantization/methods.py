"""vLLM's methods of linear layers: how parameters are made and loaded where vLLM would request CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor import parameter
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8
from vllm.model_executor.parameter import PerTensorScaleParameter

from fl_dispatch.hosting.quantized import orders
from fl_dispatch.hosting.quantized.schemes import Kind, Scheme

from . import refused
from .blocks import create_in_blocks
from .kernels import GROUPED


@register_weight_loader_v2_supported_method
class Fp8MethodFL(fp8.Fp8LinearMethod):
    """Method that keeps the scales of merged layers; vLLM would requantize their weights to one scale.

    With ``VLLM_BATCH_INVARIANT`` vLLM multiplies directly, with weights in its own form, which these are not.
    """

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        block = self.weight_block_size[0] if self.weight_block_size else 0
        create_in_blocks(super().create_weights, block, "weight_scale_inv", layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.fp8_linear.process_weights_after_loading(layer)
        # Latent attention gets a weight without blocks from a product; otherwise vLLM expects it transposed.
        self.use_marlin = not self.block_quant

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = self.fp8_linear.apply_weights(layer, x, bias)
        return result


class WithoutMarlin:
    """Methods that choose among the registered kernels; vLLM's own ``__init__`` checks whether Marlin runs."""

    def __init__(self, quant_config: Any) -> None:
        self.quant_config, self.quant_type, self.input_dtype = quant_config, quant_config.quant_type, None


@register_weight_loader_v2_supported_method
class GPTQMethodFL(WithoutMarlin, auto_gptq.AutoGPTQLinearMethod):
    """Linear layers of ``gptq``."""


@register_weight_loader_v2_supported_method
class AWQMethodFL(WithoutMarlin, auto_awq.AutoAWQMarlinLinearMethod):
    """Linear layers of ``awq``."""

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], *args: Any, **kwargs: Any
    ) -> None:
        _refuse_cut_words(layer, output_partition_sizes, self.quant_config.weight_bits)
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *args, **kwargs)


@register_weight_loader_v2_supported_method
class GroupedMethodFL(LinearMethodBase):
    """Kinds of :data:`GROUPED`: a method of vLLM, and a scheme of its ``compressed-tensors``.

    vLLM's own methods request CUDA kernels, or leave inputs unquantized.

    Args:
        scheme: one layer's scheme.
        kind: its kind.
        prefix: the layer's prefix.
    """

    def __init__(self, scheme: Scheme, kind: Kind, prefix: str) -> None:
        self.kernel = GROUPED[kind](scheme)
        if lacking := self.kernel.fl_lacking():
            raise refused(f"the weights of {prefix} ({lacking})")
        self.apply_weights = self.apply  # the attribute name that a scheme has

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None],
        **named: Any,
    ) -> None:
        parts = list(output_partition_sizes)
        self.kernel.create_weights(layer, parameter, input_size_per_partition, parts, params_dtype, weight_loader)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.kernel.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.kernel.apply_weights(layer, x, bias)


# -- a scheme of vLLM's ``compressed-tensors`` ------------------------------------------------------------------------


def with_scale_of_each_input(
    create: Callable[..., None], layer: Any, output_partition_sizes: list[int], **named: Any
) -> None:
    """Register parameters as vLLM does; each merged layer keeps its input scale, where vLLM keeps only the last."""
    create(layer=layer, output_partition_sizes=output_partition_sizes, **named)
    if layer.input_scale is not None:
        scales = torch.full((len(output_partition_sizes),), orders.UNSET)
        layer.input_scale = PerTensorScaleParameter(data=scales, weight_loader=named["weight_loader"])


def with_whole_words(
    create: Callable[..., None], bits: int, layer: Any, output_partition_sizes: list[int], **named: Any
) -> None:
    """Register parameters as vLLM does, with zero points of several columns packed in an int32."""
    _refuse_cut_words(layer, output_partition_sizes, bits)
    create(layer=layer, output_partition_sizes=output_partition_sizes, **named)


def _refuse_cut_words(layer: Any, parts: list[int], bits: int) -> None:
    """Raise ``ValueError`` if an int32 packs columns of two parts of a merged layer: vLLM's loader loses some."""
    if any(size % (orders.WORD // bits) for size in parts):
        raise refused(
            f"parts of {parts} columns of a joined layer on a rank, not all multiples of a word's {orders.WORD // bits}"
            f" ({getattr(layer, 'prefix', '')})"
        )


def with_rows(create: Callable[..., None], scheme: Any, rounding: str, **named: Any) -> None:
    """Register parameters as vLLM does, and set the kernel's rounding of rows, which vLLM omits."""
    create(**named)
    scheme.kernel.fl_rounding = rounding


def load(scheme: Any, kernel: str, layer: Any) -> None:
    """Let a scheme's kernel prepare a loaded layer."""
    getattr(scheme, kernel).process_weights_after_loading(layer)
