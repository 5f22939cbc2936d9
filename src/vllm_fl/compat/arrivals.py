"""Requests that arrive while an engine's thread makes steps.

vLLM receives a request in a separate thread, and its engine sees it at the next scheduling. A worker in the same
process asks here whether to end its steps earlier.
"""

from __future__ import annotations

import importlib
from functools import wraps
from typing import Any

ENGINE = "vllm.v1.engine.core"

_come = False


def listen() -> None:
    """Make the engine of this process record each request that it receives. Idempotent."""
    engine: Any = importlib.import_module(ENGINE).EngineCore
    take = engine.preprocess_add_request
    if hasattr(take, "__wrapped__"):
        return

    @wraps(take)
    def noted(self: Any, request: Any) -> Any:
        taken = take(self, request)
        note()
        return taken

    engine.preprocess_add_request = noted


def note() -> None:
    """Record that a request has arrived."""
    global _come
    _come = True


def forget() -> None:
    """Forget arrivals, because the scheduler sees them now."""
    global _come
    _come = False


def has_come() -> bool:
    """Whether a request has arrived since the last scheduling."""
    return _come
