"""End the streams of vLLM's engine client, which may leave a running request without an answer."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

SERVERS = "uvicorn"
"""A package that every serving process has imported; other processes would import vLLM's client in vain."""


def end_requests() -> None:
    """End a server's streams when its engine's client ends. Idempotent.

    vLLM puts an error on the queue of the task that passes outputs to streams, and cancels that task at once. Either
    may come first. If the task ends before it reads the error, a stream waits until its client disconnects, and the
    server waits, too.
    """
    if SERVERS not in sys.modules:
        return
    from vllm.utils.async_utils import run_in_loop
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    original = AsyncLLM.shutdown
    if hasattr(original, "fl_ends"):
        return

    @wraps(original)
    def shutdown(self: Any, timeout: float | None = None) -> None:
        original(self, timeout=timeout)
        if (handler := getattr(self, "output_handler", None)) is not None:
            run_in_loop(handler.get_loop(), self.output_processor.propagate_error, EngineDeadError())

    shutdown.fl_ends = True  # type: ignore[attr-defined]
    AsyncLLM.shutdown = shutdown
