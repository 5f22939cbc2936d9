"""The implementations that come first in the policy's order, and what a host has to know of them before it starts."""

from __future__ import annotations

from collections.abc import Iterable

from .. import get_default_manager, get_policy
from ..selection.decision import Decision, select
from ..types import OpImpl

GRAPHS = "graphs"
"""The property that is ``False`` for an implementation that no graph can hold."""

INDUCTOR = "inductor"
"""The property that is ``False`` for an implementation slower than its reference where Inductor fuses that."""


def first_choices(op: str) -> list[OpImpl]:
    """The first choices for an operator, one for each condition of its rules, whatever a host has stated so far."""
    manager, policy = get_default_manager(), get_policy()
    manager.ensure_initialized()
    return chosen(select(op, manager.registry.get_implementations(op), policy))


def chosen(decision: Decision) -> list[OpImpl]:
    """The first candidate of each branch of a decision, without repetitions."""
    return list(dict.fromkeys(branch.candidates[0] for branch in decision.branches if branch.candidates))


def left_to_inductor(operators: Iterable[str]) -> list[str]:
    """The operators whose first choices are all slower than the reference where Inductor fuses that."""
    firsts = {op: first_choices(op) for op in operators}
    return [op for op, impls in firsts.items() if impls and all(i.properties.get(INDUCTOR) is False for i in impls)]


def without_graphs(operators: Iterable[str]) -> list[OpImpl]:
    """The first choices for these operators that no graph can hold."""
    return [impl for op in operators for impl in first_choices(op) if impl.properties.get(GRAPHS) is False]
