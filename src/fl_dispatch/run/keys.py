"""The keys of a table's entries, and the form of call that each entry is for.

``op`` is called by name, ``op@scope`` by an operator that was bound (the scope may be empty), and ``op:layer`` by name
with a layer first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..ops import OPERATORS
from .layer_form import may_be_layer

CALL, BOUND, LAYER = "call", "bound", "layer"
LAYER_KEYS = {name: f"{name}:layer" for name, operator in OPERATORS.items() if operator.layer is not None}
"""Operators that take a layer first → the key of such calls."""


class Key(NamedTuple):
    """One entry of a table: its key, operator, scope, and the form of call that it is for."""

    text: str
    op_name: str
    scope: str | None
    form: str


def keys_of(op_name: str, scopes: Iterable[str]) -> list[Key]:
    """The entries of one operator: by name, with a layer first, and one for each scope that was bound."""
    layer = [Key(LAYER_KEYS[op_name], op_name, None, LAYER)] if op_name in LAYER_KEYS else []
    return [Key(op_name, op_name, None, CALL), *layer, *(bound_key(op_name, scope) for scope in sorted(scopes))]


def bound_key(op_name: str, scope: str) -> Key:
    """The entry of a bound operator."""
    return Key(f"{op_name}@{scope}", op_name, scope or None, BOUND)


def key_of(op_name: str, args: tuple[Any, ...]) -> str:
    """The key of a call by name."""
    return LAYER_KEYS[op_name] if op_name in LAYER_KEYS and args and may_be_layer(args[0]) else op_name
