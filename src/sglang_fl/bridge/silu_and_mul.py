"""``SiluAndMul`` over the operator ``silu_and_mul``."""

from __future__ import annotations

from .activation import ActivationBridge


class SiluAndMulBridge(ActivationBridge):
    fl_operator = "silu_and_mul"
