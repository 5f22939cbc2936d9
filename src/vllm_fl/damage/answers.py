"""The error of a request that ended because of damage: vLLM's servers only say "Internal server error"."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from ..compat.ending import SERVERS

ERROR = "error"
"""vLLM's word for the end of a request with an error."""


class Reason(str):
    """vLLM's finish reason ``error`` with our explanation attached."""

    fl_why: str


def explain() -> None:
    """Make a server's errors say why a request ended. Idempotent."""
    if SERVERS not in sys.modules:
        return
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import GenerationError
    from vllm.v1.engine.output_processor import RequestState

    original, raising = RequestState._new_completion_output, GenerateBaseServing._raise_if_error
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if output.finish_reason == ERROR and isinstance(output.stop_reason, str):
            output.finish_reason = Reason(ERROR)
            output.finish_reason.fl_why = output.stop_reason
        return output

    @wraps(raising)
    def raised(self: Any, finish_reason: str | None, request_id: str) -> None:
        if isinstance(finish_reason, Reason):
            raise GenerationError(finish_reason.fl_why)
        raising(self, finish_reason, request_id)

    RequestState._new_completion_output = explained
    GenerateBaseServing._raise_if_error = raised
