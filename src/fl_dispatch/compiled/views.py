"""Opaque views: declared operators as ``torch.library`` operators, for compiled code that must not look inside.

A view dispatches anew whenever it runs, so it serves what a trace cannot hold: an implementation that Dynamo cannot
trace, a choice that depends on the arguments. Everything about it is derived from the declaration. An operator that
may write arguments has two views, because a schema says once and for all what is written:

- ``fl_dispatch::rms_norm(Tensor x, Tensor? weight, float epsilon, str scope) -> Tensor`` writes nothing;
- ``fl_dispatch::rms_norm_(Tensor(a!) x, Tensor(b!) residual, ...) -> ()`` writes its results into the arguments, in the
  order in which the declaration lists them.

The parameter that decides between them (``residual``; ``inplace``; ``out``) is a constant in a trace. Neither view
returns a tensor that shares memory with an argument. ``scope`` is the layer for which the operator was bound. Views are
for inference: they have no gradient.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DispatchError
from ..locking import writers
from ..ops import Operator
from ..run.recovery import recover
from ..run.table import DispatchTable
from ..selection.decision import Decision
from ..state import unknown

NAMESPACE = "fl_dispatch"
KEPT_PROMISES = 4096
"""Kinds of arguments of which a view remembers what results were promised for."""
_SCHEMA_TYPES = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str"}
# A reload must not drop the library: compiled graphs hold its operators.
_library: torch.library.Library | None = globals().get("_library")


@dataclass(frozen=True)
class Variant:
    """One of an operator's views.

    Args:
        name: of the torch operator, without the namespace.
        parameters: the declared parameters that it takes, in order.
        fixed: the parameters that it does not take (the hints, and the one that decides between two views), and the
            value of each.
        writes: the parameters into which it writes the first results, in their order.
        returns: the schema types of the other results.
    """

    name: str
    parameters: tuple[str, ...]
    fixed: dict[str, Any]
    writes: tuple[str, ...]
    returns: tuple[str, ...]


@functools.cache
def view(root: DispatchTable, operator: Operator, scope: str = "") -> Callable[..., Any]:
    """A function with the operator's parameters, in the declaration's order, that calls its opaque views.

    Args:
        root: what the views read; one in a process, because PyTorch has one operator of a name.
        operator: the declaration; it must allow :attr:`~fl_dispatch.ops.Mode.OPAQUE`.
        scope: the layer for which it dispatches.

    Returns:
        The function. What it writes it also returns, as the operator does. Hints are dropped.
    """
    decider, _ = _decider(operator)
    names = list(operator.parameters)
    lines = [f"def {operator.name}({', '.join(names)}):"]
    namespace: dict[str, Any] = {}
    for variant in variants(operator):
        namespace[f"_{variant.name}"] = getattr(getattr(torch.ops, NAMESPACE), _define(root, operator, variant)).default
        call = f"_{variant.name}({', '.join([*variant.parameters, repr(scope)])})"
        indent = "    "
        if decider and not variant.writes:
            lines.append(f"    if {decider} is None or {decider} is False:")
            indent = "        "
        if not variant.writes:
            lines.append(f"{indent}return {call}")
            continue
        others = [f"_other{index}" for index in range(len(variant.returns))]
        lines.append(f"    {', '.join(others)}{' = ' if others else ''}{call}")
        results = [*variant.writes, *others] if _returns_tensors(operator) else []
        lines.append(f"    return {', '.join(results) or 'None'}")
    exec("\n".join(lines), namespace)
    function: Callable[..., Any] = namespace[operator.name]
    return function


def variants(operator: Operator) -> tuple[Variant, ...]:
    """The views of an operator: one that writes nothing, one that writes, or both.

    Raises:
        ValueError: what it writes cannot be told from one parameter.
    """
    results = _results(operator)
    operands, hints = operator.operands(tuple(operator.parameters)), dict.fromkeys(operator.hints)
    if not operator.writes:
        return (Variant(operator.name, operands, hints, (), tuple(results)),)
    decider, absent = _decider(operator)
    writes = tuple(operator.writes)
    if not decider:
        rest = results[len(writes) :] if results else []
        return (Variant(operator.name, operands, hints, writes, tuple(rest)),)
    without = tuple(name for name in operands if name != decider)
    with_it = without if absent is False else operands
    fixed = {**hints, decider: True} if absent is False else hints
    return (
        Variant(operator.name, without, {**hints, decider: absent}, (), tuple(results)),
        Variant(f"{operator.name}_", with_it, fixed, writes, tuple(_results(operator, given=True)[len(writes) :])),
    )


def schema(operator: Operator, variant: Variant) -> str:
    """The torch schema of a view, without its name."""
    hints = _types(operator)
    parts = []
    for name in variant.parameters:
        kind, optional = _schema_type(operator, name, hints[name])
        if name in variant.writes:
            kind = f"Tensor({chr(ord('a') + variant.writes.index(name))}!)"
            optional = optional and name != _decider(operator)[0]
        parts.append(f"{kind}{'?' if optional else ''} {name}")
    returns = ", ".join(variant.returns)
    return f"({', '.join([*parts, 'str scope'])}) -> {returns if len(variant.returns) == 1 else f'({returns})'}"


def _decider(operator: Operator) -> tuple[str, bool | None]:
    """The parameter that decides whether arguments are written, and its value if not; empty if every call writes."""
    deciders = {
        write.given or (name if operator.parameters[name].default is None else "")
        for name, write in operator.writes.items()
    }
    if len(deciders) > 1:
        raise ValueError(f"operator {operator.name}: several parameters decide what is written: {sorted(deciders)}")
    decider = next(iter(deciders), "")
    return decider, False if decider and _types(operator)[decider] is bool else None


@functools.cache
def _types(operator: Operator) -> dict[str, Any]:
    return typing.get_type_hints(operator.prototype)


def _schema_type(operator: Operator, name: str, hint: Any) -> tuple[str, bool]:
    """The schema type of a hint, and whether it is optional."""
    members = [member for member in _members(hint) if member is not types.NoneType]
    if len(members) != 1 or members[0] not in _SCHEMA_TYPES:
        raise ValueError(f"operator {operator.name}: '{name}' has no type that a torch operator can take: {hint}")
    return _SCHEMA_TYPES[members[0]], len(_members(hint)) > 1


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _results(operator: Operator, given: bool = False) -> list[str]:
    """The schema types of the results.

    Where the return type is a union, the tuple is returned when the deciding parameter is given, else the tensor.
    """
    hint = _types(operator)["return"]
    members = _members(hint)
    tuples = [member for member in members if typing.get_origin(member) is tuple]
    if len(members) > 1:
        hint = tuples[0] if given and tuples else next(member for member in members if member not in tuples)
    if hint is types.NoneType:
        return []
    parts = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
    typed = (_schema_type(operator, "return", part) for part in parts)
    return [f"{kind}{'?' if optional else ''}" for kind, optional in typed]


def _returns_tensors(operator: Operator) -> bool:
    return bool(_results(operator, given=True))


def _define(root: DispatchTable, operator: Operator, variant: Variant) -> str:
    """Define a view unless it exists; returns its name."""
    global _library
    with writers:
        if _library is None:
            _library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
        if not hasattr(getattr(torch.ops, NAMESPACE), variant.name):
            _library.define(f"{variant.name}{schema(operator, variant)}")  # type: ignore[no-untyped-call]
            kernel = _kernel(root, operator, variant)
            _library.impl(variant.name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
            fake = _fake(operator, variant)
            torch.library.register_fake(f"{NAMESPACE}::{variant.name}", fake, lib=_library)
    return variant.name


def _full(operator: Operator, variant: Variant) -> str:
    """The operator's arguments in the declaration's order, as source: what the view does not take is a constant."""
    return ", ".join(repr(variant.fixed[name]) if name in variant.fixed else name for name in operator.parameters)


def _kernel(root: DispatchTable, operator: Operator, variant: Variant) -> Callable[..., Any]:
    """What the view runs: a dispatched call, and then care for the memory of its results."""
    own = [name for name in operator.parameters if name in variant.parameters]
    tensors = [name for name in own if Tensor in _members(_types(operator)[name])]
    targets = variant.writes
    call = f"({_full(operator, variant)}{',' if operator.parameters else ''})"
    lines = [
        f"def {variant.name}({', '.join([*variant.parameters, 'scope'])}):",
        "    _table = _root",
        "    if not _table.plain:",
        "        if not _table.settled:",
        "            _table.start()",
        "        _table = _table.current",
        f"    _key = {operator.name!r} if not scope else {operator.name + '@'!r} + scope",
        "    if _key not in _table.entries:",  # a graph from a cache may be older than this process's layers
        f"        _key = {operator.name!r}",
        "    try:",
        "        _fn = _table.entries[_key]",
        "    except KeyError:",
        f"        raise _unknown({operator.name!r}) from None",
        "    try:",
        f"        _result = _fn{call}",
        "    except Exception as error:",
        f"        _result = _recover(_key, _table, _fn, error, {call}, {{}})",
    ]
    if _returns_tensors(operator):
        kinds = [f"({name} is not None and ({name}.shape, {name}.dtype))" if name in tensors else name for name in own]
        lines += [
            f"    _kind = ({', '.join(kinds)},)",
            f"    _promise = _promises.get(_kind) or _promised({call}, _kind, _promises)",
            "    if _result is not None and _described(_result) != _promise:",
            "        raise _broken(_table.plans[_key].decision, _result, _promise)",
        ]
    if targets:
        done = " and ".join(f"_result[{i}] is {name}" for i, name in enumerate(targets))
        if len(_results(operator, given=True)) == 1:
            done = f"_result is {targets[0]}"
        if not variant.returns:
            lines += [f"    if _result is None or ({done}):", "        return None"]
        lines.append(f"    return _fresh(({', '.join(tensors)},), _store(({', '.join(targets)},), _result))")
    elif variant.returns == ("Tensor",):
        shared = " or ".join(
            f"({name} is not None and _place == {name}.untyped_storage().data_ptr())"
            if type(None) in _members(_types(operator)[name])
            else f"_place == {name}.untyped_storage().data_ptr()"
            for name in tensors
        )
        lines += [
            "    _place = _result.untyped_storage().data_ptr()",
            f"    return _result.clone() if {shared} else _result.contiguous()",
        ]
    else:
        lines.append(f"    return _fresh(({', '.join(tensors)},), _result)")
    namespace = {"_root": root, "_recover": recover, "_unknown": unknown, "_store": _store, "_fresh": _fresh}
    namespace |= {"_promises": {}, "_promised": functools.partial(_promised, operator), "_described": _described}
    namespace |= {"_broken": functools.partial(_broken, operator)}
    exec("\n".join(lines), namespace)
    function: Callable[..., Any] = namespace[variant.name]  # type: ignore[assignment]
    return function


def _fake(operator: Operator, variant: Variant) -> Callable[..., Any]:
    if operator.fake is None:
        raise ValueError(f"operator {operator.name} has no fake function, so it has no opaque view")
    compute = operator.fake

    def fake(*args: Any) -> Any:
        if not variant.returns:
            return None
        values = {**dict(zip(variant.parameters, args, strict=False)), **variant.fixed}
        results = compute(*(values[name] for name in operator.operands(tuple(operator.parameters))))
        results = results if isinstance(results, tuple) else (results,)
        results = results[len(variant.writes) :]
        return results[0] if len(results) == 1 else results

    return fake


def _described(result: Any) -> tuple[Any, ...]:
    """Shape and dtype of each result: what compiled code reads its memory by."""
    if isinstance(result, Tensor):
        return ((result.shape, result.dtype),)
    return tuple((one.shape, one.dtype) if isinstance(one, Tensor) else one for one in result)


def _promised(
    operator: Operator, args: tuple[Any, ...], kind: tuple[Any, ...], promises: dict[tuple[Any, ...], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """What the declaration promises for arguments of this kind."""
    assert operator.fake is not None
    if len(promises) >= KEPT_PROMISES:
        promises.clear()
    promise = promises[kind] = _described(operator.fake(*args))
    return promise


def _broken(operator: Operator, decision: Decision, result: Any, promise: tuple[Any, ...]) -> DispatchError:
    """The error for results that are not what compiled code was promised."""

    def text(described: tuple[Any, ...]) -> str:
        return ", ".join(f"{tuple(one[0])} {one[1]}" if isinstance(one, tuple) else str(one) for one in described)

    return DispatchError(
        f"'{operator.name}' returned {text(_described(result))}, but {text(promise)} is declared; compiled code would "
        f"read its memory wrongly. One of these ran: {', '.join(impl.impl_id for impl in decision.candidates)}"
    )


def _store(targets: tuple[Tensor | None, ...], result: Any) -> tuple[Any, ...]:
    """Put the first results into the arguments that they belong in; returns the rest."""
    pending = list(result) if isinstance(result, tuple) else [result]
    places = [_storage(target) for target in targets if target is not None and target.numel()]
    if len(set(places)) < len(places) and _overlap([target for target in targets if target is not None]):
        raise ValueError("the arguments that this operator writes share memory, so they cannot hold different results")
    for index, target in enumerate(targets):
        value = pending[index]
        if target is None or value is target:
            continue
        for later in range(index + 1, len(pending)):  # a later result may live in this argument
            if isinstance(pending[later], Tensor) and _storage(pending[later]) == _storage(target):
                pending[later] = pending[later].clone()
        target.copy_(value)
    return tuple(pending[len(targets) :])


def _fresh(inputs: tuple[Tensor | None, ...], result: Any) -> Any:
    """The results, none of which shares memory with an input or with another result."""
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    if not results:
        return None
    taken = {_storage(value) for value in inputs if value is not None}
    fresh = []
    for value in results:
        own = value
        if isinstance(value, Tensor) and value.numel():
            if _storage(value) in taken:
                own = value.clone()
            own = own.contiguous()
            taken.add(_storage(own))
        fresh.append(own)
    return fresh[0] if len(fresh) == 1 else tuple(fresh)


def _overlap(tensors: list[Tensor]) -> bool:
    """Whether two of the tensors are the same memory; views of one projection that lie apart are not."""
    return any(one.data_ptr() == two.data_ptr() for i, one in enumerate(tensors) for two in tensors[:i])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
