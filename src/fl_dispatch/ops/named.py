"""Functions that name their parameters: helpers of a declaration, and ``supports``, take a subset by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

Parameter = inspect.Parameter
ANY = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
IN_ORDER = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
NEAR = 0.8
"""Similarity from which on an unknown name counts as misspelt, by :mod:`difflib`'s ratio."""


def names_of(
    function: Callable[..., Any], operands: Sequence[str], hints: Sequence[str] = ()
) -> tuple[str, ...] | None:
    """Return the declared parameters that a function names, in its own order.

    Args:
        function: a helper or a ``supports``.
        operands: the declared parameters in order, without hints.
        hints: further names that it may have.

    Returns:
        The names, or ``None`` if the function takes all operands in order: it takes ``*args``, has the same number of
        parameters with undeclared names, or has no readable signature.

    Raises:
        TypeError: the function requires an undeclared parameter, misspells one, or would get another's argument under a
            declared name.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    declared = (*operands, *hints)
    own = {parameter.name: at for at, parameter in enumerate(parameters) if parameter.name not in declared}
    if any(parameter.kind in ANY for parameter in parameters):
        _refuse_moved([parameter.name for parameter in parameters if parameter.kind in IN_ORDER], operands, ())
        return None
    if own and _binds(function, len(operands)):
        _refuse_moved([parameter.name for parameter in parameters], operands, tuple(own))
        return None
    for name in own:
        if near := difflib.get_close_matches(name, declared, 1, cutoff=NEAR):
            raise TypeError(f"'{name}' is no parameter of the declaration; did you mean '{near[0]}'?")
        if inspect.signature(function).parameters[name].default is Parameter.empty:
            raise TypeError(f"'{name}' is no parameter of the declaration, which has {', '.join(declared)}")
    return tuple(parameter.name for parameter in parameters if parameter.name not in own)


def of_arguments(function: Callable[..., Any], declared: Mapping[str, Parameter]) -> Callable[..., Any]:
    """Return a function of the declared parameters, in order, that passes on those that ``function`` names.

    Omitted last arguments have their defaults.

    Raises:
        TypeError: see :func:`names_of`; or the function takes neither its names nor all arguments in order.
    """
    names = names_of(function, tuple(declared))
    if names is None:
        if _binds(function, len(declared)) is False:
            raise TypeError(f"it takes {inspect.signature(function)}, neither by name nor all in order")
        return function
    by_name = [one for one in names if inspect.signature(function).parameters[one].kind is Parameter.KEYWORD_ONLY]
    if by_name:
        return _with_keywords(function, names[: -len(by_name)], by_name, declared)
    if names == tuple(declared):
        return function
    places = [tuple(declared).index(name) for name in names]
    defaults = tuple(parameter.default for parameter in declared.values())
    if not places:
        return lambda *args: function()
    pick = itemgetter(*places)
    if len(places) == 1:
        return lambda *args: function(pick(args + defaults[len(args) :]))
    return lambda *args: function(*pick(args + defaults[len(args) :]))


def _with_keywords(
    function: Callable[..., Any], names: Sequence[str], by_name: Sequence[str], declared: Mapping[str, Parameter]
) -> Callable[..., Any]:
    def chosen(*args: Any) -> Any:
        given = {
            **{name: parameter.default for name, parameter in declared.items()},
            **dict(zip(declared, args, strict=False)),
        }
        return function(*(given[name] for name in names), **{name: given[name] for name in by_name})

    return chosen


def _binds(function: Callable[..., Any], count: int) -> bool | None:
    """Whether a function takes ``count`` arguments in order; ``None`` if its signature cannot be read."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _refuse_moved(names: Sequence[str], operands: Sequence[str], own: Sequence[str]) -> None:
    """Raise :class:`TypeError` if a function that would get all operands in order names one at another place.

    Args:
        own: undeclared names; empty if the function takes ``*args``.
    """
    for place, name in zip(operands, names, strict=False):
        if name not in operands or name == place:
            continue
        for each in own:
            if near := difflib.get_close_matches(each, [one for one in operands if one not in names], 1, cutoff=NEAR):
                raise TypeError(f"'{each}' is no parameter of the declaration; did you mean '{near[0]}'?")
        why = f"'{own[0]}' is no parameter of the declaration" if own else "it takes all that come"
        raise TypeError(f"{why}, so they come in order, and '{name}' would get '{place}'")
