"""The dispatch manager: its class, the process's manager, and calls through it."""

from __future__ import annotations

from .calls import bind_op, call_op, explain, resolve_op
from .op_manager import OpManager
from .process import freeze_dispatch, get_default_manager, reset_default_manager, thaw_dispatch

__all__ = [
    "OpManager",
    "bind_op",
    "call_op",
    "explain",
    "freeze_dispatch",
    "get_default_manager",
    "reset_default_manager",
    "resolve_op",
    "thaw_dispatch",
]
