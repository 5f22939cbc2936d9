"""``QuickGELU`` over the operator ``quick_gelu``."""

from __future__ import annotations

from .activation import ActivationBridge


class QuickGELUBridge(ActivationBridge):
    fl_operator = "quick_gelu"
