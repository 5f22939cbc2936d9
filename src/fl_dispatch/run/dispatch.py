"""Dispatch a call through any root table and key, where speed does not matter."""

from __future__ import annotations

from typing import Any

from ..state import unknown
from .keys import key_of
from .recovery import recover
from .table import DispatchTable


def call_through(
    root: DispatchTable, op_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], key: str = ""
) -> Any:
    """Run an operator; ``key`` is a bound operator's."""
    if root.stale:
        root.start()
    table = root if root.plain else root.current
    key = key or key_of(op_name, args)
    fn = table.entries.get(key)
    if fn is None:
        raise unknown(op_name)
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        failure = error
    try:
        return recover(key, table, fn, failure, args, kwargs)
    finally:
        del failure  # the traceback holds this frame, and with it the arguments
