"""The times of two policies that take turns in one engine, and whether one is slower.

Other work on the machine only adds to a time, and seldom to all parts of a run. So a policy's time is the sum of the
parts of a run, each the lower quartile over all turns. A minimum would depend on one moment when the machine was idle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TURNS = range(4, 33)
"""Smallest and largest number of turns of each policy; they alternate in fours."""
DRAWS = 200
"""Random halves of the turns."""
SURE_FROM = 8
"""Number of turns from which on the range leaves out the extremes: 5 % of the halves on either side."""

Run = Sequence[float]
"""Seconds of the parts of one run."""


@dataclass(frozen=True)
class Ratio:
    """One policy's time as a multiple of another's.

    Args:
        share: the multiple.
        low, high: range of the multiples in random halves of the turns.
        turns: number of turns of each policy.
    """

    share: float
    low: float
    high: float
    turns: int

    def __str__(self) -> str:
        return f"{self.turns} turns each, from {self.low:.2f} to {self.high:.2f}"

    def decides(self, limit: float) -> bool:
        """Whether the whole range is above the limit, or within it."""
        return self.low > limit or self.high <= limit

    @property
    def spread(self) -> float:
        """Return the factor by which the times vary."""
        return self.high / self.low


def lower_quartile(runs: Sequence[Run]) -> float:
    """Return the sum of the parts of a run, each the lower quartile over several runs; of three, the minimum."""
    return float(sum(sorted(part)[len(part) // 4] for part in zip(*runs, strict=True)))


def ratio(runs: Sequence[Run], trusted: Sequence[Run]) -> Ratio:
    """Return the ratio of two policies' times, with a range from subsamples.

    Resampling with replacement would repeat extremes too often (Politis, Romano and Wolf, Subsampling, 1999).
    """
    draw, half = random.Random(0), len(runs) // 2
    halves = ((draw.sample(runs, half), draw.sample(trusted, half)) for _ in range(DRAWS))
    ratios = sorted(lower_quartile(one) / lower_quartile(other) for one, other in halves)
    outside = 0 if len(runs) < SURE_FROM else DRAWS // 20
    return Ratio(lower_quartile(runs) / lower_quartile(trusted), ratios[outside], ratios[-1 - outside], len(runs))


def alternate(suspected: Callable[[], Run], trusted: Callable[[], Run], limit: float) -> Ratio:
    """Measure two policies in turns until the ratio of their times is reliably above or within a limit.

    Both have the machine's load, because the order is the suspected policy, the trusted one twice, and the suspected.
    """
    runs, goods = list[Run](), list[Run]()
    while True:
        runs.append(suspected())
        goods += [trusted(), trusted()]
        runs.append(suspected())
        found = ratio(runs, goods) if len(runs) in TURNS else None
        if found is not None and (found.decides(limit) or found.turns + 1 not in TURNS):
            return found
