"""Modules that are half imported: the importing thread may meet one again, and other threads may be waiting for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType, ModuleType
from typing import Any

NOT_YET = "a module that it needs is being imported"


def is_importing() -> bool:
    """Whether this thread is executing the body of a module, so that another thread may wait for it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and _is_incomplete(frame.f_globals):
            return True
        frame = frame.f_back
    return False


def is_incomplete(module: ModuleType) -> bool:
    """Whether a module is being imported."""
    return _is_incomplete(vars(module))


def is_of_incomplete_module(error: BaseException) -> bool:
    """Whether a name was missing in a module because this thread is still importing the module."""
    owner: object = None
    if isinstance(error, AttributeError):
        owner = error.obj
    elif isinstance(error, ImportError):
        owner = sys.modules.get(error.name or "")
    return isinstance(owner, ModuleType) and is_incomplete(owner)


def _is_incomplete(namespace: Mapping[str, Any]) -> bool:
    return bool(getattr(namespace.get("__spec__"), "_initializing", False))
