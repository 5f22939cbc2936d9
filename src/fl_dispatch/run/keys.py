"""The keys of a table's entries, and the form of call for which each entry is made.

``op`` is an operator called by name, ``op@scope`` a bound operator (the scope may be empty), and ``op:layer`` an
operator called by name with a layer first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..ops import OPERATORS
from .layer_form import may_be_layer

CALL, BOUND, LAYER = "call", "bound", "layer"
LAYER_KEYS = {name: f"{name}:layer" for name, operator in OPERATORS.items() if operator.layer is not None}
"""Operators that take a layer first → the key of calls with a layer."""


class Key(NamedTuple):
    """One entry of a table: its key, operator, scope, and form of call."""

    text: str
    op_name: str
    scope: str | None
    form: str


def keys_of(op_name: str, scopes: Iterable[str]) -> list[Key]:
    """Return the entries of one operator: by name, with a layer first, and one for each bound scope."""
    layer = [Key(LAYER_KEYS[op_name], op_name, None, LAYER)] if op_name in LAYER_KEYS else []
    return [Key(op_name, op_name, None, CALL), *layer, *(bound_key(op_name, scope) for scope in sorted(scopes))]


def bound_key(op_name: str, scope: str) -> Key:
    """Return the entry of a bound operator."""
    return Key(f"{op_name}@{scope}", op_name, scope or None, BOUND)


def key_of(op_name: str, args: tuple[Any, ...]) -> str:
    """Return the key of a call by name."""
    return LAYER_KEYS[op_name] if op_name in LAYER_KEYS and args and may_be_layer(args[0]) else op_name
