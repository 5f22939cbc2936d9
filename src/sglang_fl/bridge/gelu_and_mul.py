"""``GeluAndMul`` over the operator ``gelu_and_mul``."""

from __future__ import annotations

from .activation import ActivationBridge


class GeluAndMulBridge(ActivationBridge):
    fl_operator = "gelu_and_mul"
    parameters = ("approximate",)
