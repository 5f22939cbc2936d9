"""``UnquantizedFusedMoEMethod`` over the operator ``fused_moe``."""

from __future__ import annotations

from typing import Any

from torch import nn

from .base import Bridge
from .mixture import Mixture, unsupported


class FusedMoEBridge(Bridge):
    """``forward(layer, dispatch_output)``; ``layer`` holds the weights.

    ``inplace`` only permits overwriting the input.
    """

    fl_operator = "fused_moe"

    def __init__(self, layer: Any, *args: Any) -> None:
        if not layer.runner.runner_backend.is_triton():
            raise ValueError(unsupported(f"weights laid out for the runner '{layer.runner.runner_backend.value}'"))
        self.mixture = Mixture(layer.moe_runner_config)
        super().__init__(layer, *args)

    @staticmethod
    def fl_scope(prefix: str) -> str:
        return prefix.removesuffix(".quant_method")

    def place(self, model: nn.Module, prefix: str) -> None:
        self.mixture.place(model, self.fl_scope(prefix))

    def forward(self, layer: Any, dispatch_output: Any) -> Any:
        """Return SGLang's ``StandardCombineInput``."""
        if (reason := self.mixture.refusal(dispatch_output)) is not None:
            return self.fall_through(reason, layer, dispatch_output)
        biases = (getattr(layer, f"{name}_weight_bias", None) for name in ("w13", "w2"))
        weights = (dispatch_output.hidden_states, layer.w13_weight, layer.w2_weight)
        return self.mixture.combine(self.fl_call(*weights, *self.mixture.routing(dispatch_output), *biases))
