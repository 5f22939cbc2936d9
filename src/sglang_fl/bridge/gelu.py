"""``NewGELU`` over the operator ``gelu``."""

from __future__ import annotations

from torch import Tensor

from .base import Bridge


class NewGELUBridge(Bridge):
    """``forward(x)``: the tanh form."""

    fl_operator = "gelu"

    def forward(self, x: Tensor) -> Tensor:
        return self.fl_call(x, "tanh")
