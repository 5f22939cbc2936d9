"""Activations of :data:`~fl_dispatch.hosting.layers.activations.ACTIVATIONS` over their operators, and ``XIELU``."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from fl_dispatch.hosting.layers.activations import ACTIVATIONS, Activation

from .base import Bridge


class ActivationBridge(Bridge):
    """``forward(x)`` of a class without weights."""

    activation: ClassVar[Activation]

    def forward(self, x: Tensor) -> Tensor:
        attributes = [getattr(self.layer, name) for name in self.activation.attributes]
        return self.fl_call(x, *attributes, *self.activation.constants)


def activation_bridge(name: str) -> type[ActivationBridge]:
    """Make the bridge of a class of SGLang."""
    found = ACTIVATIONS[name]
    body = {"__module__": __name__, "fl_operator": found.operator, "activation": found}
    return type(f"{name}Bridge", (ActivationBridge,), body)


class XIELUBridge(Bridge):
    """``forward(input)``.

    The operator takes numbers, but the layer has one-element tensors. They are read once, when the layer first runs
    with loaded weights, because reading them in each call would wait for the device.
    """

    fl_operator = "xielu"

    def __init__(self, layer: Any, *args: Any) -> None:
        super().__init__(layer, *args)
        self.beta, self.epsilon = float(layer.beta), float(layer.eps)

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self.layer
        return self.fl_call(input, layer.alpha_p, layer.alpha_n, self.beta, self.epsilon)
