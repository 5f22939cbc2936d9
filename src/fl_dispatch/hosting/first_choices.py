"""The implementations that come first in the policy's order, and what a host has to know of them before it starts."""

from __future__ import annotations

from collections.abc import Iterable

from .. import get_default_manager
from ..types import OpImpl

GRAPHS = "graphs"
"""The property that is ``False`` for an implementation that no graph can hold."""

INDUCTOR = "inductor"
"""The property that is ``False`` for an implementation slower than its reference where Inductor fuses that."""


def left_to_inductor(operators: Iterable[str]) -> list[str]:
    """The operators whose first choices are all slower than the reference where Inductor fuses that."""
    manager = get_default_manager()
    firsts = {op: manager.first_choices(op) for op in operators}
    return [op for op, impls in firsts.items() if impls and all(i.properties.get(INDUCTOR) is False for i in impls)]


def without_graphs(operators: Iterable[str], given: Iterable[str] = ()) -> list[OpImpl]:
    """The first choices for these operators, called with these optional parameters, that no graph can hold."""
    manager = get_default_manager()
    firsts = (impl for op in operators for impl in manager.first_choices(op, given=given))
    return [impl for impl in firsts if impl.properties.get(GRAPHS) is False]
