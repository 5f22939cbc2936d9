"""``UnquantizedFusedMoEMethod`` over the operator ``fused_moe``.

SGLang's native experts know gated SiLU and GELU and gpt-oss's SwiGLU, and read nothing else of the layer's
configuration. The bridge does or refuses what they would leave out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .base import Bridge, Unbridged

ACTIVATIONS = {
    ("silu", True): "silu",
    ("gelu", True): "gelu_tanh",  # as in SGLang's native experts; only its compiled kernels take the error function
    ("gelu_tanh", True): "gelu_tanh",
    ("silu", False): "silu_no_mul",
    ("gelu", False): "gelu_no_mul",
    ("relu2", False): "relu2_no_mul",
}
SCALING_BLOCKS = frozenset({"DeepseekV2MoE", "Glm4MoeSparseMoeBlock", "Glm4MoeLiteSparseMoeBlock"})
"""Blocks that multiply their experts' sum by ``routed_scaling_factor`` themselves, except on SGLang's own GPUs. The
others leave it to the experts, and SGLang's native ones do not do it."""


def activation(config: Any) -> str:
    """The operator's name of a layer's activation.

    Raises:
        Unbridged, ValueError: as :class:`~sglang_fl.bridge.base.Bridge` says.
    """
    name = ACTIVATIONS.get((config.activation, config.is_gated))
    if name is None:
        raise _native(config, f"experts with the activation '{config.activation}'")
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    if alpha is None:
        if limit is not None:
            raise ValueError(_unsupported("a limited SwiGLU"))
        return name
    if name != "silu" or config.gemm1_beta not in (None, 1.0) or not config.gate_up_interleaved:
        raise ValueError(_unsupported("this form of a scaled SwiGLU"))
    if (alpha, limit) != (1.702, 7.0):
        raise _native(config, f"a SwiGLU with the factor {alpha} and the limit {limit}")
    return "swigluoai"


def _native(config: Any, feature: str) -> Exception:
    """SGLang's native experts compute it, unless something else is asked for that they leave out."""
    if config.routed_scaling_factor in (None, 1.0):
        return Unbridged(feature)
    return ValueError(_unsupported(f"{feature}, scaled by {config.routed_scaling_factor},"))


def _unsupported(feature: str) -> str:
    return f"sglang_fl does not support {feature} in a mixture of experts yet"


class FusedMoEBridge(Bridge):
    """``forward(layer, dispatch_output)``; ``layer`` holds the weights.

    ``inplace`` only permits to overwrite the input. Expert numbers are the rank's own already, -1 for one elsewhere.
    """

    fl_operator = "fused_moe"

    def __init__(self, layer: Any, *args: Any) -> None:
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
        from sglang.srt.layers.moe.topk import TopKOutputChecker

        config = layer.moe_runner_config
        if config.no_combine:
            raise ValueError(_unsupported("expert outputs that are not summed"))
        if config.swiglu_limit is not None:
            raise ValueError(_unsupported("a limited SwiGLU"))
        if not layer.runner.runner_backend.is_triton():
            raise ValueError(_unsupported(f"weights laid out for the runner '{layer.runner.runner_backend.value}'"))
        self.activation = activation(config)
        self.factor: float = config.routed_scaling_factor or 1.0
        self.combine_input, self.names_experts = StandardCombineInput, TopKOutputChecker.format_is_standard
        super().__init__(layer, *args)

    @staticmethod
    def fl_scope(prefix: str) -> str:
        return prefix.removesuffix(".quant_method")

    def place(self, model: nn.Module, prefix: str) -> None:
        block = model.get_submodule(self.fl_scope(prefix).rpartition(".")[0])
        if SCALING_BLOCKS & {base.__name__ for base in type(block).__mro__}:
            self.factor = 1.0

    def forward(self, layer: Any, dispatch_output: Any) -> Any:
        """SGLang's ``StandardCombineInput``."""
        if not dispatch_output.format.is_standard() or not self.names_experts(dispatch_output.topk_output):
            return self.fall_through("tokens dispatched in a format of their own", layer, dispatch_output)
        if dispatch_output.hidden_states_scale is not None:
            return self.fall_through("quantized tokens", layer, dispatch_output)
        chosen = dispatch_output.topk_output
        total: Tensor = self.fl_call(
            dispatch_output.hidden_states,
            layer.w13_weight,
            layer.w2_weight,
            chosen.topk_weights,
            chosen.topk_ids,
            self.activation,
            self.layer.moe_runner_config.apply_router_weight_on_input,
            None,
            getattr(layer, "w13_weight_bias", None),
            getattr(layer, "w2_weight_bias", None),
        )
        return self.combine_input(total if self.factor == 1.0 else total.mul_(self.factor))
