"""``ReLU2`` over the operator ``relu2``."""

from __future__ import annotations

from .activation import ActivationBridge


class ReLU2Bridge(ActivationBridge):
    fl_operator = "relu2"
