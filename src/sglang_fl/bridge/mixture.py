"""SGLang's layer of experts except its weights, for any code that multiplies with them.

SGLang's native experts support gated SiLU and GELU and gpt-oss's SwiGLU, and ignore the rest of the layer's
configuration. This module implements the rest, or refuses it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fl_dispatch.hosting.layers.attribute import Attached

from .base import Unbridged

ACTIVATIONS = {
    ("silu", True): "silu",
    ("gelu", True): "gelu_tanh",  # as in SGLang's native experts; only its compiled kernels take the error function
    ("gelu_tanh", True): "gelu_tanh",
    ("silu", False): "silu_no_mul",
    ("gelu", False): "gelu_no_mul",
    ("relu2", False): "relu2_no_mul",
}
SCALING_BLOCKS = frozenset({"DeepseekV2MoE", "Glm4MoeSparseMoeBlock", "Glm4MoeLiteSparseMoeBlock"})
"""Blocks that multiply their experts' sum by ``routed_scaling_factor`` themselves, except where SGLang's ``is_cuda()``
is true. Other blocks leave it to the experts, and SGLang's native ones omit it."""


def unsupported(feature: str) -> str:
    """Return the sentence that refuses experts."""
    return f"sglang_fl does not support {feature} in a mixture of experts yet"


def activation(config: Any) -> str:
    """Return the operator's name of a layer's activation.

    Raises:
        Unbridged, ValueError: see :class:`.base.Bridge`.
    """
    name = ACTIVATIONS.get((config.activation, config.is_gated))
    if name is None:
        raise _native(config, f"experts with the activation '{config.activation}'")
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    if alpha is None:
        if limit is not None:
            raise ValueError(unsupported("a limited SwiGLU"))
        return name
    if name != "silu" or config.gemm1_beta not in (None, 1.0) or not config.gate_up_interleaved:
        raise ValueError(unsupported("this form of a scaled SwiGLU"))
    if (alpha, limit) != (1.702, 7.0):
        raise _native(config, f"a SwiGLU with the factor {alpha} and the limit {limit}")
    return "swigluoai"


def _native(config: Any, feature: str) -> Exception:
    """Return the error of a feature: stay native, or refuse if SGLang's experts would omit another feature."""
    if config.routed_scaling_factor in (None, 1.0):
        return Unbridged(feature)
    return ValueError(unsupported(f"{feature}, scaled by {config.routed_scaling_factor},"))


class Mixture:
    """Everything but the weights, read from a layer's configuration (SGLang's ``MoeRunnerConfig``).

    Raises:
        Unbridged, ValueError: see :class:`.base.Bridge`.
    """

    def __init__(self, config: Any) -> None:
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
        from sglang.srt.layers.moe.topk import TopKOutputChecker

        if config.no_combine:
            raise ValueError(unsupported("expert outputs that are not summed"))
        if config.swiglu_limit is not None:
            raise ValueError(unsupported("a limited SwiGLU"))
        self.activation = activation(config)
        self.factor: float = config.routed_scaling_factor or 1.0
        self.config, self.combine_input = config, StandardCombineInput
        self.names_experts = TopKOutputChecker.format_is_standard

    def place(self, model: nn.Module, prefix: str) -> None:
        """Receive the model when it is loaded; the experts are its submodule ``prefix``."""
        from sglang.srt.utils.common import is_cuda

        block = model.get_submodule(prefix.rpartition(".")[0])
        if not is_cuda() and SCALING_BLOCKS & {base.__name__ for base in type(block).__mro__}:
            self.factor = 1.0

    def refusal(self, dispatch_output: Any) -> str | None:
        """Return why these tokens cannot be computed, or ``None``."""
        if not dispatch_output.format.is_standard() or not self.names_experts(dispatch_output.topk_output):
            return "tokens dispatched in a format of their own"
        if dispatch_output.hidden_states_scale is not None:
            return "quantized tokens"
        return None

    def routing(self, dispatch_output: Any) -> tuple[Tensor, Tensor, str, bool, None]:
        """Return the arguments of our operators from ``topk_weights`` to ``expert_map``.

        Expert numbers are already the rank's own, -1 for experts of other ranks.
        """
        chosen, on_input = dispatch_output.topk_output, self.config.apply_router_weight_on_input
        return chosen.topk_weights, chosen.topk_ids, self.activation, on_input, None

    def combine(self, total: Tensor) -> Any:
        """Return SGLang's ``StandardCombineInput``."""
        return self.combine_input(total if self.factor == 1.0 else total.mul_(self.factor))


MIXTURE = Attached[Mixture]("fl_mixture")
"""The mixture of a layer with quantized experts; bridges hold theirs directly."""
