"""Generated functions: table entries that do more than the bare implementation, and bound operators.

Only a function with the operator's own parameters costs no more than a Python call; a wrapper object or an ``*args``
closure costs several times more. The source is made from the declaration alone, never from user input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from ..ops import Operator
from ..signatures import Convention
from ..types import OpImpl
from .keys import BOUND, LAYER
from .layer_form import LayerStandIn, attributes_of, passed_by, refuse_a_stranger
from .table import DispatchTable

_FILE = "<string>"  # vLLM leaves exactly this name out of its compile-cache key, and tries to read any other


def direct(
    operator: Operator | None,
    impl: OpImpl,
    convention: Convention | None,
    form: str,
    fn: Callable[..., Any],
    otherwise: Callable[..., Any],
    unproven: Sequence[str] | None = (),
    ask: bool = True,
    view: Callable[..., Any] | None = None,
    declined: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Make the function for a table entry that usually runs its first candidate at once.

    Args:
        operator: the declaration; ``None`` for an undeclared operator.
        impl: the first candidate.
        convention: how it is called.
        form: ``call`` (the caller may leave out defaults), ``bound`` (all arguments are passed) or ``layer`` (a layer
            comes first).
        fn: the implementation's function, or a wrapper of it that counts or compares.
        otherwise: called with the same arguments when the candidate must not run.
        unproven: optional parameters that make the call write arguments for which the candidate is not proven. With
            ``None`` the candidate is not proven at all, so ``otherwise`` runs unless it declines.
        ask: whether to ask the implementation's ``supports``.
        view: the opaque view that runs inside compiled code, with all of the operator's parameters.
        declined: called with the same arguments if the candidate declines them; by default ``otherwise``.
    """
    supports = impl.supports if ask else None
    declined = declined or otherwise
    if operator is None or convention is None:
        fn = otherwise if unproven is None else fn
        return fn if supports is None else _predicated(fn, supports, otherwise, declined)
    guards = [_at_default(operator, name) for name in convention.left_out]
    free = ["False"] if unproven is None else [f"({name} is None or {name} is False)" for name in unproven]
    bare = convention.takes_all(layer_first=form == LAYER)
    unguarded = supports is None and not guards and not free
    if bare and unguarded and view is None and (form == BOUND or convention.defaults):
        return fn
    names = {"_fn": fn, "_otherwise": otherwise, "_declined": declined, "_supports": supports, "_view": view}
    return _generate(operator, convention, form, names, guards, free)


def bound(
    operator: Operator,
    key: str,
    root: DispatchTable,
    recover: Callable[..., Any],
    unknown: Callable[[str], Exception],
) -> Callable[..., Any]:
    """Make a bound operator: a function with the operator's signature and the table lookup built in."""
    args = f"({''.join(f'{name}, ' for name in operator.parameters)})"
    lines = [
        f"def {operator.name}({_signature(operator, operator.parameters)}):",
        *dispatched(operator, args, [f"    _key = {key!r}"], "return "),
    ]
    function = _compile(operator, "\n".join(lines), {"_root": root, "_recover": recover, "_unknown": unknown})
    function.__doc__ = operator.doc
    return function


def dispatched(operator: Operator, args: str, key: Sequence[str], take: str = "_result = ") -> list[str]:
    """Return the source of a dispatched call, shared by bound operators and opaque views.

    Args:
        operator: the declaration.
        args: the arguments as the source of a tuple.
        key: lines that set ``_key`` and may read ``_table``.
        take: ``return``, or an assignment if more code follows.
    """
    more_follows = take != "return "
    return [
        "    _table = _root",
        "    if not _table.plain:",
        "        if _table.stale:",
        "            _table.start()",
        "        _table = _table.current",
        *key,
        "    try:",
        "        _fn = _table.entries[_key]",
        "    except KeyError:",
        f"        raise _unknown({operator.name!r}) from None",
        *(["    _failure = None"] if more_follows else ()),
        "    try:",
        f"        {take}_fn{args}",
        "    except Exception as _error:",
        "        _failure = _error",
        "    if _failure is not None:",
        "        try:",
        f"            {take}_recover(_key, _table, _fn, _failure, {args}, {{}})",
        "        finally:",
        "            del _failure",  # the traceback holds this frame, and with it the arguments
    ]


def _generate(
    operator: Operator,
    convention: Convention,
    form: str,
    names: Mapping[str, Callable[..., Any] | None],
    guards: Sequence[str],
    free: Sequence[str],
) -> Callable[..., Any]:
    """Make the function of :func:`direct`; decline unless all ``guards`` hold, run only if all of ``free`` hold."""
    attributes, own = attributes_of(operator), passed_by(operator)
    if form == LAYER:
        head = ", ".join(["_obj", _signature(operator, own)]) if own else "_obj"
        prepare = _read_attributes(attributes)
        passed = ", ".join(["_obj", *own])
    else:
        head, prepare, passed = _signature(operator, operator.parameters), [], ", ".join(operator.parameters)
    if convention.layer_first:
        stand_in = ", ".join(f"{attribute!r}: {name}" for name, attribute in attributes.items())
        layer = "_obj" if form == LAYER else f"_LayerStandIn({{{stand_in}}})"
        call = f"_fn({', '.join([layer, *convention.takes])})"
    else:
        call = f"_fn({', '.join(convention.takes)})"
    lines = [f"def {operator.name}({head}):", *prepare]
    if names["_view"] is not None:
        lines += ["    if _is_compiling():", f"        return _view({', '.join(operator.parameters)})"]
    if names["_supports"] is not None:  # a predicate that raises runs again on the other path, which logs its error
        # In a trace the answer may be symbolic: neither True nor a string.
        lines += [
            "    try:",
            f"        _fits = _supports({_asked(convention)})",
            "        _fits = _fits is True or (not isinstance(_fits, str) and bool(_fits))",
            "    except Exception:",
            "        _fits = None",
            "    if _fits is None:",
            f"        return _otherwise({passed})",
        ]
        guards = ["_fits", *guards]
    if guards:
        lines += [f"    if not ({' and '.join(guards)}):", f"        return _declined({passed})"]
    if free:
        lines += [f"    if not ({' and '.join(free)}):", f"        return _otherwise({passed})"]
    lines.append(f"    return {call}")
    namespace = {**names, "_LayerStandIn": LayerStandIn, "_is_compiling": torch.compiler.is_dynamo_compiling}
    namespace["_refuse_a_stranger"] = functools.partial(refuse_a_stranger, operator)
    return _compile(operator, "\n".join(lines), namespace)


def _read_attributes(attributes: Mapping[str, str]) -> list[str]:
    """Return lines that read a layer's attributes; plain reads first, because ``getattr`` with a default is slower."""
    if not attributes:
        return []
    plain = [f"        {name} = _obj.{attribute}" for name, attribute in attributes.items()]
    absent = [
        f"        {name} = getattr(_obj, {attribute!r}, _default_{name})" for name, attribute in attributes.items()
    ]
    return ["    try:", *plain, "    except AttributeError:", "        _refuse_a_stranger(_obj)", *absent]


def _predicated(
    fn: Callable[..., Any],
    supports: Callable[..., bool | str],
    otherwise: Callable[..., Any],
    declined: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a function that asks ``supports`` first; if that raises an error, it calls ``otherwise``."""

    def predicated(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = supports(*args, **kwargs)
            fits = not isinstance(answer, str) and bool(answer)
        except Exception:  # the predicate runs again on the other path, which logs its error
            fits = None
        if fits is None:
            return otherwise(*args, **kwargs)
        return fn(*args, **kwargs) if fits else declined(*args, **kwargs)

    return predicated


def _asked(convention: Convention) -> str:
    """Return the arguments of ``supports``, as source."""
    return ", ".join([*convention.operands, *(f"{name}={name}" for name in convention.asked)])


def _at_default(operator: Operator, name: str) -> str:
    default = operator.parameters[name].default
    return f"{name} is {default!r}" if default is None or isinstance(default, bool) else f"{name} == _default_{name}"


def _signature(operator: Operator, names: Any) -> str:
    parts = []
    for name in names:
        has_default = operator.parameters[name].default is not operator.parameters[name].empty
        parts.append(f"{name}=_default_{name}" if has_default else name)
    return ", ".join(parts)


@functools.lru_cache(maxsize=4096)
def _code(source: str) -> CodeType:
    return compile(source, _FILE, "exec")


def _compile(operator: Operator, source: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    for name, parameter in operator.parameters.items():
        namespace[f"_default_{name}"] = None if parameter.default is parameter.empty else parameter.default
    namespace["torch"] = torch
    exec(_code(source), namespace)
    function: Callable[..., Any] = namespace[operator.name]
    return function
