"""Functions that name what they look at: a helper of a declaration, or a ``supports``, takes some of the parameters."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

Parameter = inspect.Parameter
ANY = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
NEAR = 0.8
"""Similarity from which on an unknown name counts as misspelt, by :mod:`difflib`'s ratio."""


def names_of(
    function: Callable[..., Any], operands: Sequence[str], hints: Sequence[str] = ()
) -> tuple[str, ...] | None:
    """The declared parameters that a function names, in its own order.

    Args:
        function: a helper or a ``supports``.
        operands: the declared parameters in order, hints excepted.
        hints: further names that it may have.

    Returns:
        The names, or ``None`` where the function takes all operands in order: it takes ``*args``, has names of its own
        for as many parameters, or has no signature that can be read.

    Raises:
        TypeError: it requires a parameter that is not declared, or misspells one.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    declared = (*operands, *hints)
    own = {parameter.name: at for at, parameter in enumerate(parameters) if parameter.name not in declared}
    if any(parameter.kind in ANY for parameter in parameters):
        return None
    if own and _binds(function, len(operands)):
        _refuse_misspelt([parameter.name for parameter in parameters], declared)
        return None
    for name in own:
        if near := difflib.get_close_matches(name, declared, 1, cutoff=NEAR):
            raise TypeError(f"'{name}' is no parameter of the declaration; did you mean '{near[0]}'?")
        if inspect.signature(function).parameters[name].default is Parameter.empty:
            raise TypeError(f"'{name}' is no parameter of the declaration, which has {', '.join(declared)}")
    return tuple(parameter.name for parameter in parameters if parameter.name not in own)


def of_arguments(function: Callable[..., Any], declared: Mapping[str, Parameter]) -> Callable[..., Any]:
    """A function of the declared parameters, in order, that passes on those that ``function`` names.

    Arguments left out at the end are at their defaults.

    Raises:
        TypeError: see :func:`names_of`.
    """
    names = names_of(function, tuple(declared))
    if names is None or names == tuple(declared):
        return function
    places = [tuple(declared).index(name) for name in names]
    defaults = tuple(parameter.default for parameter in declared.values())
    if not places:
        return lambda *args: function()
    pick = itemgetter(*places)
    if len(places) == 1:
        return lambda *args: function(pick(args + defaults[len(args) :]))
    return lambda *args: function(*pick(args + defaults[len(args) :]))


def _binds(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def _refuse_misspelt(names: Sequence[str], declared: Sequence[str]) -> None:
    """Raise :class:`TypeError` for a name near a declared one, where a declared name at another place shows that the
    function is not meant to take all in order.
    """
    moved = [name for at, name in enumerate(names) if name in declared and declared.index(name) != at]
    for name in names if moved else ():
        near = difflib.get_close_matches(name, [one for one in declared if one not in names], 1, cutoff=NEAR)
        if name not in declared and near:
            raise TypeError(f"'{name}' is no parameter of the declaration; did you mean '{near[0]}'?")
