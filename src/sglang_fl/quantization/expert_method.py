"""Quantized experts in SGLang's form: a method at each layer."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from torch import nn

from fl_dispatch.hosting.quantized.experts import NAMES
from fl_dispatch.hosting.quantized.stored_experts import Experts, Parameters, Sizes

from ..bridge.base import Unbridged
from ..bridge.mixture import MIXTURE, Mixture, unsupported
from . import refused


class QuantizedExpertsMethod(FusedMoEMethodBase):
    """SGLang's method for a layer's kind of experts.

    Args:
        kind: one layer's kind.
        quant_config: the model's configuration.

    Attributes:
        inner: elements of a token.
        dtype: the model's dtype.
        biased: whether both products have biases.
    """

    biased: bool
    inner: int
    dtype: torch.dtype

    def __init__(self, kind: Experts, quant_config: Any) -> None:
        self.kind, self.quant_config = kind, quant_config

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader, owner = extra_weight_attrs["weight_loader"], type(layer).__name__
        self.inner, self.dtype = hidden_size, params_dtype
        # Loaders of other checkpoint forms, and models' own loaders, know SGLang's methods by name.
        if getattr(loader, "__func__", None) is not FusedMoE.weight_loader:
            raise refused(f"quantized experts that {owner} loads in a way of its own ({layer.layer_name})")
        self.biased = bool(extra_weight_attrs.get("with_bias"))
        if self.biased and self.quant_config.fl_format != "mxfp4":
            raise refused(f"quantized experts with biases ({layer.layer_name})")
        gates = 2 if layer.moe_runner_config.is_gated else 1
        place = hidden_size, intermediate_size_per_partition, gates, layer.moe_tp_size, params_dtype
        parameters = Parameters(layer, {"weight_loader": loader}, reads_order=True)
        sizes = Sizes(num_experts, *place)
        if reason := self.kind.create_weights(parameters, sizes):
            raise refused(f"{reason} ({layer.layer_name})")
        for name, columns, _ in sizes.weights() if self.biased else ():
            parameters.add(f"{name}_weight_bias", torch.zeros(num_experts, columns, dtype=params_dtype))

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        """Make no SGLang runner, because ``apply`` is the whole computation."""
        try:
            MIXTURE.give(layer, Mixture(moe_runner_config))
        except Unbridged as reason:  # SGLang has no native experts for quantized weights
            raise ValueError(unsupported(f"quantized {reason}")) from reason

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Convert the parameters to the operator's form.

        Raises:
            ValueError: no implementation computes these experts here, or one that waits for the device would replace
                another.
        """
        self.kind.process_weights_after_loading(layer)
        for name in NAMES if self.biased else ():
            layer.register_parameter(f"{name}_bias", layer._parameters.pop(f"{name}_weight_bias"))
        if reason := self.kind.waiting(layer, self.dtype, MIXTURE.of(layer).activation):
            raise refused(f"these experts ({reason}; {layer.layer_name})")

    def apply(self, layer: nn.Module, dispatch_output: Any) -> Any:
        """Return SGLang's ``StandardCombineInput``."""
        mixture = MIXTURE.of(layer)
        if (reason := mixture.refusal(dispatch_output)) is not None:
            raise NotImplementedError(unsupported(reason))
        routing = mixture.routing(dispatch_output)
        return mixture.combine(self.kind.apply_experts(layer, dispatch_output.hidden_states, *routing, None))
