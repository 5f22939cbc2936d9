"""How an implementation's parameters relate to the operator's declaration.

The check runs once, at registration: the core calls by position, so a difference would become a wrong answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from .errors import RegistrationError
from .logger_manager import get_logger
from .ops import Operator
from .ops.named import names_of
from .types import OpImpl

logger = get_logger(__name__)
Parameter = inspect.Parameter
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
OBJ = "obj"


@dataclass(frozen=True)
class Convention:
    """How to call an implementation with the operator's arguments.

    Args:
        takes: the declared parameters that it takes, in the declaration's order.
        left_out: the declared parameters that it does not take; a call that gives one goes to another implementation.
        dropped: the hints that it does not take; a call leaves them out.
        operands: the positional arguments of its ``supports``.
        asked: the keyword arguments of its ``supports``: hints, and parameters that it lists after one.
        layer_first: its first parameter is a layer.
        defaults: whether its function takes names and omitted defaults exactly as the declaration does.
    """

    takes: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    operands: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    layer_first: bool = False
    defaults: bool = True

    def takes_all(self, layer_first: bool) -> bool:
        """Whether the full argument list of the declaration, or of its layer form, can be passed unchanged."""
        return self.layer_first == layer_first and not self.left_out and not self.dropped


def convention_of(impl: OpImpl, operator: Operator) -> Convention:
    """Compare an implementation with its operator's declaration.

    Raises:
        RegistrationError: they do not fit; the message names both.
    """
    declared = operator.parameters
    if impl.signature == "unchecked":
        return _unchecked(impl, operator)
    parameters = _parameters(impl)
    if [parameter.kind for parameter in parameters] == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]:
        logger.warning(
            "%s takes (*args, **kwargs), so its parameters cannot be checked; "
            "signature='unchecked' says that this is meant",
            _name(impl),
        )
        return _unchecked(impl, operator)
    layer_first = bool(parameters) and parameters[0].name == OBJ and OBJ not in declared
    expected: Mapping[str, Parameter] = declared
    if layer_first:
        if operator.layer is None:
            raise _mismatch(impl, operator, "it takes a layer (obj), but the operator has no layer form")
        expected = {name: p for name, p in declared.items() if name not in operator.layer.attributes}
        parameters = parameters[1:]
    taken = _match(impl, operator, parameters, expected)
    # A caller may name parameters and leave defaults out; the function itself must then not stand for the operator.
    ordinary = len(taken) == len(parameters) and all(p.kind is not Parameter.POSITIONAL_ONLY for p in taken.values())
    left_out = tuple(name for name in expected if name not in taken and name not in operator.hints)
    operands, asked = _asked(impl, operator, left_out)
    return Convention(
        takes=tuple(taken),
        left_out=left_out,
        dropped=tuple(name for name in operator.hints if name not in taken),
        operands=operands,
        asked=asked,
        layer_first=layer_first,
        defaults=ordinary
        and all(taken[name].default is not Parameter.empty for name in taken if _optional(expected[name])),
    )


def _unchecked(impl: OpImpl, operator: Operator) -> Convention:
    """Return the convention of a callable without a signature: the first declared parameters, and no hints."""
    first = tuple(name for name in operator.operands(tuple(operator.parameters)) if name not in operator.later)
    asked = _asked(impl, operator, operator.later)
    return Convention(first, operator.later, operator.hints, *asked, defaults=False)


def _asked(impl: OpImpl, operator: Operator, left_out: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the arguments of ``supports``: positional ones, then keyword ones.

    ``supports`` gets the parameters that it names. With ``*args``, or with undeclared names, it gets all operands in
    order, except last ones that the implementation leaves out and ``supports`` cannot take. A call that gives one of
    these goes to another implementation, so a parameter added to a declaration breaks no package.

    Raises:
        RegistrationError: ``supports`` names an undeclared parameter, or does not take all operands.
    """
    operands = everything = operator.operands(tuple(operator.parameters))
    if impl.supports is None:
        return everything, ()
    try:
        signature = inspect.signature(impl.supports)
    except (TypeError, ValueError):
        return everything, ()
    asked = tuple(name for name in operator.hints if name in signature.parameters)
    try:
        names = _names(impl.supports, operator, everything, left_out)
        if names is not None:
            by_name = {name for name, p in signature.parameters.items() if p.kind is Parameter.KEYWORD_ONLY} | {*asked}
            first = next((at for at, name in enumerate(names) if name in by_name), len(names))
            return names[:first], names[first:]
        while operands and operands[-1] in left_out and not _takes(signature, operands, asked):
            operands = operands[:-1]
        signature.bind(*operands, **dict.fromkeys(asked))
    except TypeError as error:
        raise RegistrationError(
            f"{_name(impl)}: its 'supports' names the parameters that it looks at, or takes all of them in order "
            f"({', '.join(everything)}), but takes {signature}: {error}"
        ) from None
    return operands, asked


def _names(
    supports: Callable[..., bool | str], operator: Operator, operands: tuple[str, ...], left_out: tuple[str, ...]
) -> tuple[str, ...] | None:
    """Return :func:`names_of`; with undeclared names, a function may omit the implementation's omitted operands."""
    try:
        return names_of(supports, operands, operator.hints)
    except TypeError:
        while operands and operands[-1] in left_out:
            operands = operands[:-1]
            with suppress(TypeError):
                if names_of(supports, operands, operator.hints) is None:
                    return None
        raise


def _takes(signature: inspect.Signature, operands: tuple[str, ...], asked: tuple[str, ...]) -> bool:
    try:
        signature.bind(*operands, **dict.fromkeys(asked))
    except TypeError:
        return False
    return True


def _match(
    impl: OpImpl, operator: Operator, parameters: list[Parameter], expected: Mapping[str, Parameter]
) -> dict[str, Parameter]:
    order = list(expected)
    taken: dict[str, Parameter] = {}
    problems: list[str] = []
    position = 0
    extra_seen = ""
    for parameter in parameters:
        name = parameter.name
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            problems.append("it takes *args or **kwargs beside others; register it with signature='unchecked'")
        elif name not in expected:
            if parameter.default is Parameter.empty:
                problems.append(f"its parameter '{name}' is not declared and has no default")
            extra_seen = extra_seen or name
        else:
            if parameter.kind not in _POSITIONAL:
                problems.append(f"'{name}' is keyword-only, but the core calls positionally")
            elif extra_seen:
                problems.append(f"its own parameter '{extra_seen}' stands before the declared '{name}'")
            elif order.index(name) < position:
                problems.append(f"'{name}' is out of order")
            position = max(position, order.index(name) + 1)
            problems += _default_problem(parameter, expected[name])
            taken[name] = parameter
    problems += [
        f"it lacks the required parameter '{name}'"
        for name, parameter in expected.items()
        if name not in taken and not _optional(parameter)
    ]
    if problems:
        raise _mismatch(impl, operator, *problems)
    return taken


def _default_problem(parameter: Parameter, declared: Parameter) -> list[str]:
    if parameter.default is Parameter.empty or _same(parameter.default, declared.default):
        return []
    wanted = "no default" if declared.default is Parameter.empty else f"the default {declared.default!r}"
    return [f"'{parameter.name}' has the default {parameter.default!r}, the declaration has {wanted}"]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # the truth value of an array or a tensor is undefined
        return False


def _optional(parameter: Parameter) -> bool:
    return parameter.default is not Parameter.empty


def _parameters(impl: OpImpl) -> list[Parameter]:
    fn = impl.fn
    if isinstance(fn, torch._ops.OpOverloadPacket):
        names: list[str] = fn.overloads()  # type: ignore[no-untyped-call]
        if len(names) != 1:
            raise RegistrationError(
                f"{_name(impl)}: the torch operator has the overloads {names}; register one of them"
            )
        fn = getattr(fn, names[0])
    if isinstance(fn, torch._ops.OpOverload):
        return [
            Parameter(
                argument.name,
                Parameter.KEYWORD_ONLY if argument.kwarg_only else Parameter.POSITIONAL_OR_KEYWORD,
                default=argument.default_value if argument.has_default_value() else Parameter.empty,
            )
            for argument in fn._schema.arguments
        ]
    custom: Callable[..., Any] | None = getattr(fn, "_opoverload", None)
    if custom is not None:
        return _parameters(OpImpl(impl.op_name, impl.impl_id, impl.kind, custom, vendor=impl.vendor))
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise RegistrationError(
            f"{_name(impl)}: its signature cannot be read ({error}); register it with signature='unchecked'"
        ) from error


def _name(impl: OpImpl) -> str:
    return f"implementation '{impl.impl_id}' of op '{impl.op_name}'"


def _mismatch(impl: OpImpl, operator: Operator, *problems: str) -> RegistrationError:
    try:
        own = str(inspect.signature(impl.fn))
    except (TypeError, ValueError):
        own = "(…)"
    return RegistrationError(
        f"{_name(impl)} does not fit the declaration: {'; '.join(problems)}\n  declared:    {operator.name}"
        f"{inspect.signature(operator.reference)}\n  implemented: {impl.impl_id}{own}\n  in:          {impl.place}"
    )
