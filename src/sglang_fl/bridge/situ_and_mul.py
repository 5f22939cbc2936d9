"""``SituAndMul`` over the operator ``situ_and_mul``."""

from __future__ import annotations

from .activation import ActivationBridge


class SituAndMulBridge(ActivationBridge):
    fl_operator = "situ_and_mul"
    parameters = ("beta", "linear_beta")
