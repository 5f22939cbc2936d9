"""``XIELU`` over the operator ``xielu``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .base import Bridge


class XIELUBridge(Bridge):
    """``forward(input)``.

    The operator takes numbers where the layer has tensors of one element. They are read once, when the layer first runs
    and its weights are loaded: reading them in each call would wait for the device.
    """

    fl_operator = "xielu"

    def __init__(self, layer: Any, *args: Any) -> None:
        super().__init__(layer, *args)
        self.beta, self.epsilon = float(layer.beta), float(layer.eps)

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self.layer
        return self.fl_call(input, layer.alpha_p, layer.alpha_n, self.beta, self.epsilon)
