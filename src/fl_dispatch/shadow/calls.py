"""The declared operator of an implementation, and the operator's call for an implementation's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ops import OPERATORS, Operator
from ..run.arguments import Call
from ..run.layer_form import read_from
from ..signatures import Convention
from ..state import State
from ..types import OpImpl


def declared(state: State, impl: OpImpl) -> tuple[Operator, Convention] | None:
    """Return the operator and the convention of an implementation; ``None`` if its calls cannot be compared."""
    operator, convention = OPERATORS.get(impl.op_name), state.registry.convention(impl)
    return None if operator is None or convention is None or operator.selection else (operator, convention)


def call_of(
    operator: Operator, convention: Convention, scope: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call:
    """Return the operator's call for the arguments of an implementation with this convention."""
    layer, given = None, dict[str, Any]()
    if convention.layer_first:
        layer, *rest = args
        args, given = tuple(rest), read_from(operator, layer)
    given |= {**dict(zip(convention.takes, args, strict=False)), **kwargs}
    return Call(operator.name, scope, (), given, layer)
