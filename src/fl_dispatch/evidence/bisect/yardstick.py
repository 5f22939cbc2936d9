"""The rounding yardstick: how far right implementations may differ in this model, for these prompts.

The yardstick is measured. The good policy runs again with every result of every operator perturbed at random, by a part
of the relative error that the operator's declaration accepts. Rounding explains the resulting change of the logits, and
also the good policy's distance from itself in a second run, and in another composition of the batch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .scores import CLIPPED, Difference

FACTOR = 4.0
"""Number of yardsticks beyond which a difference is not rounding."""
UNSURE = 2.0
"""A run that differs by this many yardsticks is repeated, up to ``FACTOR * FACTOR / UNSURE``: the same ratio on both
sides of :data:`FACTOR`.
"""
MOVES = 3
"""Runs with perturbed results."""
SMALLEST = 1e-6
"""The smallest yardstick, because float32 logits are rounded themselves."""


class Verdict(enum.StrEnum):
    """The answer of a run about its choices."""

    ROUNDING = "rounding"
    DIFFERS = "differs"
    FAILS = "fails"
    """The engine did not start, died, or gave no answer."""
    AS_FAST = "as fast"
    SLOWER = "slower"
    """The verdicts where times are judged, and no logits."""

    @property
    def agrees(self) -> bool:
        """Whether the choices are as good as the trusted ones."""
        return self in (Verdict.ROUNDING, Verdict.AS_FAST)


@dataclass(frozen=True)
class Yardstick:
    """The largest and the mean distance caused by harmless changes.

    Args:
        largest: distance of one row.
        mean: mean over all rows of one run.
    """

    largest: float
    mean: float

    @classmethod
    def of(cls, harmless: Iterable[Difference]) -> Yardstick:
        """Make the yardstick from the differences caused by harmless changes."""
        seen = list(harmless)
        largest = max((one.largest for one in seen), default=0.0)
        return cls(max(largest, SMALLEST), max((one.mean for one in seen), default=0.0) or SMALLEST / 10)

    def share(self, found: Difference) -> float:
        """Return a difference in yardsticks: the larger of the shares of the largest row and of the mean."""
        return max(found.largest / self.largest, found.mean / max(self.mean, SMALLEST / 10))

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"largest": self.largest, "mean": self.mean}


def is_close(share: float) -> bool:
    """Whether a run is too close to :data:`FACTOR` to decide, and must be repeated."""
    return UNSURE <= share <= FACTOR * FACTOR / UNSURE


def verdict(shares: Iterable[float]) -> Verdict:
    """Return the verdict of the median of one or several runs; each in yardsticks."""
    ordered = sorted(shares)
    return Verdict.DIFFERS if ordered[len(ordered) // 2] > FACTOR else Verdict.ROUNDING


def is_blind(yardstick: Yardstick) -> bool:
    """Whether a harmless change already reaches the clipped distance, so that policies cannot be distinguished."""
    return yardstick.largest >= CLIPPED
