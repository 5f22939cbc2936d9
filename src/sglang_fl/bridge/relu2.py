"""``ReLU2`` over the operator ``relu2``."""

from __future__ import annotations

from .activation import ActivationBridge


class ReLU2Bridge(ActivationBridge):
    operator = "relu2"
