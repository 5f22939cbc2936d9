"""The operator's call behind a call of an implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ops import Operator
from ..run.arguments import Call
from ..run.layer_form import read_from
from ..signatures import Convention


def call_of(
    operator: Operator, convention: Convention, scope: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call:
    """The operator's call that the arguments of an implementation with this convention come from."""
    layer, given = None, dict[str, Any]()
    if convention.layer_first:
        layer, *rest = args
        args, given = tuple(rest), read_from(operator, layer)
    given |= {**dict(zip(convention.takes, args, strict=False)), **kwargs}
    return Call(operator.name, scope, (), given, layer)
