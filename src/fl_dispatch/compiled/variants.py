"""The variants of an opaque view, derived from an operator's declaration, because a schema is fixed.

An operator that may write arguments has two variants, because a schema says which arguments are written; see
:mod:`.views`.
"""

from __future__ import annotations

import functools
import types
import typing
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ops import Operator

_SCHEMA_TYPES = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str"}


@dataclass(frozen=True)
class Variant:
    """One of an operator's views.

    Args:
        name: the torch operator's name, without the namespace.
        parameters: the declared parameters that it takes, in order.
        fixed: the parameters that it does not take (hints, and the parameter that decides between two views) → their
            values.
        writes: the parameters into which it writes the first results, in their order.
        returns: the schema types of the other results.
    """

    name: str
    parameters: tuple[str, ...]
    fixed: dict[str, Any]
    writes: tuple[str, ...]
    returns: tuple[str, ...]


def variants(operator: Operator) -> tuple[Variant, ...]:
    """Return the views of an operator: one that writes nothing, one that writes, or both.

    Raises:
        ValueError: more than one parameter decides what the operator writes.
    """
    returned = return_types(operator)
    operands, hints = operator.operands(tuple(operator.parameters)), dict.fromkeys(operator.hints)
    if not operator.writes:
        return (Variant(operator.name, operands, hints, (), tuple(returned)),)
    decider, absent = decider_of(operator)
    writes = tuple(operator.writes)
    if not decider:
        rest = returned[len(writes) :]
        return (Variant(operator.name, operands, hints, writes, tuple(rest)),)
    without = tuple(name for name in operands if name != decider)
    with_it = without if absent is False else operands
    fixed = {**hints, decider: True} if absent is False else hints
    return (
        Variant(operator.name, without, {**hints, decider: absent}, (), tuple(returned)),
        Variant(f"{operator.name}_", with_it, fixed, writes, tuple(return_types(operator, given=True)[len(writes) :])),
    )


def schema(operator: Operator, variant: Variant) -> str:
    """Return the torch schema of a view, without its name."""
    hints = types_of(operator)
    parts = []
    for name in variant.parameters:
        kind, optional = _schema_type(operator, name, hints[name])
        if name in variant.writes:
            kind = f"Tensor({chr(ord('a') + variant.writes.index(name))}!)"
            optional = optional and name != decider_of(operator)[0]
        parts.append(f"{kind}{'?' if optional else ''} {name}")
    returns = ", ".join(variant.returns)
    return f"({', '.join([*parts, 'str scope'])}) -> {returns if len(variant.returns) == 1 else f'({returns})'}"


def decider_of(operator: Operator) -> tuple[str, bool | None]:
    """Return the parameter that decides whether a call writes, and its value if not; empty if every call writes.

    An operator that always writes one argument also writes each optional one that a call passes.
    """
    deciders = {
        write.given or (name if operator.parameters[name].default is None else "")
        for name, write in operator.writes.items()
    }
    if "" in deciders:
        return "", None
    if len(deciders) > 1:
        raise ValueError(f"operator {operator.name}: several parameters decide what is written: {sorted(deciders)}")
    decider = next(iter(deciders), "")
    return decider, False if decider and types_of(operator)[decider] is bool else None


@functools.cache
def types_of(operator: Operator) -> dict[str, Any]:
    """Return the type hints of an operator's parameters, and of its result as ``return``."""
    return typing.get_type_hints(operator.reference)


def _schema_type(operator: Operator, name: str, hint: Any) -> tuple[str, bool]:
    """Return the schema type of a type hint, and whether it is optional."""
    members = [member for member in members_of(hint) if member is not types.NoneType]
    if len(members) != 1 or members[0] not in _SCHEMA_TYPES:
        raise ValueError(f"operator {operator.name}: '{name}' has no type that a torch operator can take: {hint}")
    return _SCHEMA_TYPES[members[0]], len(members_of(hint)) > 1


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union; any other type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def return_types(operator: Operator, given: bool = False) -> list[str]:
    """Return the schema types of the results.

    If the return type is a union, its last tuple is returned if the deciding parameter is given; otherwise the tensor,
    or the first of two tuples.
    """
    hint = types_of(operator)["return"]
    members = members_of(hint)
    tuples = [member for member in members if typing.get_origin(member) is tuple]
    if len(members) > 1:
        hint = tuples[-1] if given and tuples else next((one for one in members if one not in tuples), tuples[0])
    if hint is types.NoneType:
        return []
    parts = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
    typed = (_schema_type(operator, "return", part) for part in parts)
    return [f"{kind}{'?' if optional else ''}" for kind, optional in typed]


def returns_tensors(operator: Operator) -> bool:
    """Whether an operator returns tensors; others only write into their operands."""
    return bool(return_types(operator, given=True))
