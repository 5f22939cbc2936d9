"""Counting calls by implementation.

Counting is off by default; while it is on, the table wraps each implementation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..types import OpImpl


class CallCounter:
    """Counter of calls by implementation. Exact under threads, because each thread has its own cell."""

    def __init__(self) -> None:
        self.on = False
        self._cells: dict[tuple[str, str], dict[int, int]] = {}
        self._wrappers: dict[OpImpl, Callable[..., Any]] = {}

    def function(self, impl: OpImpl) -> Callable[..., Any]:
        """Return an implementation's function for the table: its own, or a wrapper that counts."""
        if not self.on:
            return impl.fn
        wrapper = self._wrappers.get(impl)
        if wrapper is None:
            cells = self._cells.setdefault((impl.op_name, impl.impl_id), {})
            wrapper = self._wrappers[impl] = _counted(impl.fn, cells)
        return wrapper

    def is_function_of(self, fn: Callable[..., Any], impl: OpImpl) -> bool:
        """Whether a function in a table is this implementation."""
        return fn is impl.fn or fn is self._wrappers.get(impl)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return calls by (operator, implementation id)."""
        return {key: sum(cells.values()) for key, cells in list(self._cells.items())}

    def reset(self) -> None:
        """Start from zero."""
        for cells in list(self._cells.values()):
            cells.clear()


def _counted(fn: Callable[..., Any], cells: dict[int, int]) -> Callable[..., Any]:
    """Return a function that counts its calls by thread."""
    get_ident = threading.get_ident

    def counted(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return fn(*args, **kwargs)
        result = fn(*args, **kwargs)  # an implementation that declines or fails did not run
        thread = get_ident()
        cells[thread] = cells.get(thread, 0) + 1  # only this thread writes this cell
        return result

    return counted
