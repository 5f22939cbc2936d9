"""``QuickGELU`` over the operator ``quick_gelu``."""

from __future__ import annotations

from .activation import ActivationBridge


class QuickGELUBridge(ActivationBridge):
    operator = "quick_gelu"
