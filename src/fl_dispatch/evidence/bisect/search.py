"""The search: pure functions over a question "do these units, and no others, make the result differ?".

One culprit among ``n`` costs ``log2(n)`` questions. The answers need not be monotonic: halving keeps the invariant that
the smaller prefix agreed and the larger one differed. So the search always ends at a unit that made the result differ
when it was added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

U = TypeVar("U")
Differs = Callable[[frozenset[U]], bool]
"""Whether the result differs when these units are bad, and all others good."""

SAMPLES = 3
"""Number of units that are tested alone before a fault counts as one of all units."""


@dataclass(frozen=True)
class Culprit(Generic[U]):
    """A unit that makes the result differ.

    Args:
        unit: the unit.
        partners: the units that it needs to do harm; empty if it differs alone.
    """

    unit: U
    partners: tuple[U, ...] = ()


@dataclass(frozen=True)
class Found(Generic[U]):
    """The result of a search.

    Args:
        culprits: in the order in which they were found.
        everywhere: whether :data:`SAMPLES` units differed when tested alone, so that all units count as culprits.
    """

    culprits: tuple[Culprit[U], ...]
    everywhere: bool = False


def first_flip(units: Sequence[U], differs: Differs[U], base: frozenset[U] = frozenset()) -> U:
    """Find the unit that makes the result differ when it is added to ``base`` and the units before it.

    The caller knows that ``base`` agrees, and that ``base`` with all units differs.

    Raises:
        ValueError: there is no unit.
    """
    if not units:
        raise ValueError("nothing to search in")
    low, high = 0, len(units)  # low units agree, high units differ
    while high - low > 1:
        middle = (low + high) // 2
        if differs(base | frozenset(units[:middle])):
            high = middle
        else:
            low = middle
    return units[high - 1]


def culprits(units: Sequence[U], differs: Differs[U], sampled: bool = False) -> Found[U]:
    """Return all units that must be good for the result to agree; none if all of them together agree.

    Args:
        units: units in a useful order, with the first layers first.
        differs: the question, which should cache its answers.
        sampled: whether to stop early for a fault in all units. After the first culprit others are tested alone; if
            each differs, all count.
    """
    left, found = list(units), list[Culprit[U]]()
    if not left or not differs(frozenset(left)):
        return Found(())
    while True:
        unit = first_flip(left, differs)
        before = left[: left.index(unit)]
        found.append(Culprit(unit, _partners(unit, before, differs)))
        left.remove(unit)
        if not left or not differs(frozenset(left)):
            return Found(tuple(found))
        if sampled and len(found) == 1 and not found[0].partners and len(left) >= SAMPLES:
            others = [left[round(place * (len(left) - 1) / (SAMPLES - 1))] for place in range(SAMPLES)]
            if all(differs(frozenset({other})) for other in reversed(others)):
                return Found((*found, *(Culprit(other) for other in left)), everywhere=True)


def _partners(unit: U, before: Sequence[U], differs: Differs[U]) -> tuple[U, ...]:
    """The smallest set among ``before`` that halving finds to make ``unit`` differ; empty if ``unit`` does alone."""
    chosen: list[U] = []
    left = list(before)
    while not differs(frozenset({unit, *chosen})):
        if not left:
            return tuple(chosen)  # answers contradict each other: noise
        partner = first_flip(left, differs, frozenset({unit, *chosen}))
        chosen.append(partner)
        left = left[: left.index(partner)]
    return tuple(chosen)


def estimate(units: Iterable[int]) -> int:
    """Return the number of questions to find one culprit in consecutive searches; ``units`` has the size of each."""
    return sum(math.ceil(math.log2(count)) + 1 for count in units if count > 1)
