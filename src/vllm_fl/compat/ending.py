"""The end of vLLM's engine client, which may leave a request that runs without an answer."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

SERVERS = "uvicorn"
"""A package that every process has imported that serves requests; others would import vLLM's client for nothing."""


def end_requests() -> None:
    """Have a server's streams end when its engine's client does. Idempotent.

    vLLM puts an error on the queue of the task that hands outputs to streams, and cancels that task at once. Either may
    come first. If the task ends before it reads the error, a stream waits until its client goes, and the server waits
    too.
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
