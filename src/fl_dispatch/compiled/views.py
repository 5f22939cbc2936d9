"""Opaque views: declared operators as ``torch.library`` operators, for compiled code that must not look inside.

A view dispatches whenever it runs, so it serves choices beyond a trace: an implementation that Dynamo cannot trace, or
a choice by arguments. It is derived from the declaration. An operator that may write arguments has two views, because a
schema says which arguments are written:

- ``fl_dispatch::rms_norm(Tensor x, Tensor? weight, float epsilon, str scope) -> Tensor`` writes nothing;
- ``fl_dispatch::rms_norm_(Tensor(a!) x, Tensor(b!) residual, ...) -> ()`` writes its results into the arguments, in the
  order in which the declaration lists them.

The parameter that decides between them (``residual``; ``inplace``; ``out``) is a constant in a trace. Neither view
returns a tensor that shares memory with an argument. ``scope`` is the layer for which the operator was bound. Views are
for inference: they have no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..locking import writers
from ..ops import Operator
from ..run.generated import dispatched
from ..run.recovery import recover
from ..run.table import DispatchTable
from ..state import unknown
from ..weight_forms import CALLED_BY_PYTORCH
from .results import broken, described, fresh, promised, store
from .variants import Variant, decider_of, members_of, return_types, returns_tensors, schema, types_of, variants

NAMESPACE = "fl_dispatch"
# A reload must keep the library, because compiled graphs hold its operators.
_library: torch.library.Library | None = globals().get("_library")


@functools.cache
def view(root: DispatchTable, operator: Operator, scope: str = "") -> Callable[..., Any]:
    """Return a function with the operator's parameters, in the declaration's order, that calls its opaque views.

    Args:
        root: the table that the views read; one per process, because PyTorch has one operator of a name.
        operator: the declaration; it must allow :attr:`~fl_dispatch.ops.Mode.OPAQUE`.
        scope: the layer's scope.

    Returns:
        The function; it returns the arguments that it writes, as the operator does, and drops hints.
    """
    decider, _ = decider_of(operator)
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
        results = [*variant.writes, *others] if returns_tensors(operator) else []
        lines.append(f"    return {', '.join(results) or 'None'}")
    exec("\n".join(lines), namespace)
    function: Callable[..., Any] = namespace[operator.name]
    return function


def _define(root: DispatchTable, operator: Operator, variant: Variant) -> str:
    """Define a view unless it exists; return its name."""
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
    """Return the operator's arguments in the declaration's order, as source; those the view lacks are constants."""
    return ", ".join(repr(variant.fixed[name]) if name in variant.fixed else name for name in operator.parameters)


def _kernel(root: DispatchTable, operator: Operator, variant: Variant) -> Callable[..., Any]:
    """Return the view's kernel: a dispatched call, followed by the copies that its results need."""
    own = [name for name in operator.parameters if name in variant.parameters]
    tensors = [name for name in own if Tensor in members_of(types_of(operator)[name])]
    targets = variant.writes
    call = f"({_full(operator, variant)}{',' if operator.parameters else ''})"
    key = [
        f"    _key = {operator.name!r} if not scope else {operator.name + '@'!r} + scope",
        "    if _key not in _table.entries:",  # a cached graph may have been made before this process bound its layers
        f"        _key = {operator.name!r}",
    ]
    lines = [
        f"def {variant.name}({', '.join([*variant.parameters, 'scope'])}):",
        *dispatched(operator, call, key),
    ]
    if returns_tensors(operator):
        kinds = [f"({name} is not None and ({name}.shape, {name}.dtype))" if name in tensors else name for name in own]
        lines += [
            f"    _kind = ({', '.join(kinds)},)",
            f"    _promise = _promises.get(_kind) or _promised({call}, _kind, _promises)",
            "    if _result is not None and _described(_result) != _promise:",
            f"        raise _broken(_table.plans[_key], _table.state, {call}, _result)",
        ]
    if targets:
        done = " and ".join(f"_result[{i}] is {name}" for i, name in enumerate(targets))
        if len(return_types(operator, given=True)) == 1:
            done = f"_result is {targets[0]}"
        if not variant.returns:
            lines += [f"    if _result is None or ({done}):", "        return None"]
        lines.append(f"    return _fresh(({', '.join(tensors)},), _store(({', '.join(targets)},), _result))")
    elif variant.returns == ("Tensor",):
        # Reading a weight's address counts as a possible write, and would prepare it again (fl_dispatch.weight_forms).
        same = {
            name: f"_result.untyped_storage()._cdata == {name}.untyped_storage()._cdata"
            if name in operator.weights
            else f"_place == {name}.untyped_storage().data_ptr()"
            for name in tensors
        }
        shared = " or ".join(
            f"({name} is not None and {found})" if type(None) in members_of(types_of(operator)[name]) else found
            for name, found in same.items()
        )
        lines += [
            "    _place = _result.untyped_storage().data_ptr()",
            f"    return _result.clone() if {shared} else _result.contiguous()",
        ]
    else:
        moving = [name for name in tensors if name not in operator.weights]
        staying = [name for name in tensors if name in operator.weights]
        lines.append(f"    return _fresh(({', '.join(moving)},), _result, ({''.join(f'{one}, ' for one in staying)}))")
    namespace: dict[str, Any] = {"__name__": CALLED_BY_PYTORCH}
    namespace |= {"_root": root, "_recover": recover, "_unknown": unknown, "_store": store, "_fresh": fresh}
    namespace |= {"_promises": {}, "_promised": functools.partial(promised, operator), "_described": described}
    namespace |= {"_broken": functools.partial(broken, operator)}
    exec("\n".join(lines), namespace)
    function: Callable[..., Any] = namespace[variant.name]
    return function


def _fake(operator: Operator, variant: Variant) -> Callable[..., Any]:
    """Return a function that makes a view's results without computing them."""
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
