"""The base of the bridges of activations."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .base import Bridge


class ActivationBridge(Bridge):
    """``forward(x)``; the operator's other parameters are attributes of the layer."""

    parameters: ClassVar[tuple[str, ...]] = ()

    def forward(self, x: Tensor) -> Tensor:
        return self.fl_call(x, *[getattr(self.layer, name) for name in self.parameters])
