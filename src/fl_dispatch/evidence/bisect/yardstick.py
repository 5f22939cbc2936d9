"""The rounding yardstick: how far right implementations may be apart in this model, for these prompts.

It is measured, not guessed. The good policy runs again with every result of every operator moved at random, by a part
of the relative error that the operator's declaration accepts. How far the logits move then is what rounding explains
here; so is the distance of the good policy from itself in a second run, and in another composition of the batch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .scores import CLIPPED, Difference

FACTOR = 4.0
"""A difference of more than so many yardsticks is not rounding."""
UNSURE = 2.0
"""From so many yardsticks on, and up to :data:`FACTOR` times as many by the same ratio, a run is repeated."""
MOVES = 3
"""Runs with results moved at random."""
SMALLEST = 1e-6
"""The yardstick is never smaller: logits of float32 are rounded themselves."""


class Verdict(enum.StrEnum):
    """The answer of a run about the choices in it."""

    ROUNDING = "rounding"
    DIFFERS = "differs"
    FAILS = "fails"
    """The engine did not start, died, or gave no answer."""


@dataclass(frozen=True)
class Yardstick:
    """The largest and the mean distance that harmless changes made.

    Args:
        largest: of one row.
        mean: of all rows of one run.
    """

    largest: float
    mean: float

    @classmethod
    def of(cls, harmless: Iterable[Difference]) -> Yardstick:
        """From what harmless changes did."""
        seen = list(harmless)
        largest = max((one.largest for one in seen), default=0.0)
        return cls(max(largest, SMALLEST), max((one.mean for one in seen), default=0.0) or SMALLEST / 10)

    def share(self, found: Difference) -> float:
        """A difference in yardsticks: the larger of the shares of the largest row and of the mean."""
        return max(found.largest / self.largest, found.mean / max(self.mean, SMALLEST / 10))

    def as_data(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"largest": self.largest, "mean": self.mean}


def is_close(share: float) -> bool:
    """Whether one run does not settle it."""
    return UNSURE <= share <= FACTOR * FACTOR / UNSURE


def verdict(shares: Iterable[float]) -> Verdict:
    """The verdict of the median of one or several runs; each in yardsticks."""
    ordered = sorted(shares)
    return Verdict.DIFFERS if ordered[len(ordered) // 2] > FACTOR else Verdict.ROUNDING


def is_blind(yardstick: Yardstick) -> bool:
    """Whether harmless changes already break every number, so that nothing could be told apart."""
    return yardstick.largest >= CLIPPED
