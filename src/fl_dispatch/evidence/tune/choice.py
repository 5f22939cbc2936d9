"""The choice of a winner: the fastest fit candidate, or an equally fast one earlier in the default order."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..intervals import interval

CONFIDENCE = 0.95
LEAST_GAIN = 0.01
"""Gains below this count as none, whatever the intervals, because two runs on one machine differ by as much."""


@dataclass(frozen=True)
class Figure:
    """The findings about one candidate for one key.

    Args:
        impl_id: the candidate.
        seconds: time of all its calls in a step, one for each repeat; empty if it was not timed.
        problem: why it must not win, or empty.
    """

    impl_id: str
    seconds: tuple[float, ...]
    problem: str = ""

    @property
    def median(self) -> float:
        """Return the median of the repeats."""
        return statistics.median(self.seconds)

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the interval that contains the median with probability 0.95, or all repeats if there are too few."""
        return interval(self.seconds, CONFIDENCE)

    def is_near(self, other: Figure) -> bool:
        """Whether the other figure is not measurably faster, or faster by at most :data:`LEAST_GAIN`."""
        return self.bounds[0] <= other.bounds[1] or self.median <= other.median * (1 + LEAST_GAIN)


@dataclass(frozen=True)
class Choice:
    """The winner of one key, and why.

    Args:
        impl_id: the winner; empty if no candidate may win.
        why: the reason, in words.
    """

    impl_id: str
    why: str


def choose(figures: Sequence[Figure]) -> Choice:
    """Return the winner among candidates in the default order."""
    fit = [figure for figure in figures if figure.seconds and not figure.problem]
    if not fit:
        reasons = "; ".join(f"{one.impl_id}: {one.problem or 'not timed'}" for one in figures)
        return Choice("", f"no candidate may win: {reasons or 'there is none'}")
    fastest = min(fit, key=lambda figure: figure.median)
    chosen = next(figure for figure in fit if figure is fastest or figure.is_near(fastest))
    others = [figure for figure in fit if figure is not chosen]
    if chosen is not fastest:
        return Choice(
            chosen.impl_id, f"{fastest.impl_id} is not faster by more than the repeats tell; earlier by default"
        )
    if not others:
        return Choice(chosen.impl_id, "the only one that may win")
    second = min(others, key=lambda figure: figure.median)
    return Choice(chosen.impl_id, f"{second.median / chosen.median:.2f} times as fast as {second.impl_id}")


def choose_together(keys: Sequence[Sequence[Figure]]) -> Choice:
    """Choose one winner for several keys; each key's candidates come in the default order.

    The lowest geometric-mean time wins; an earlier candidate within :data:`LEAST_GAIN` keeps its place. A candidate
    must fit every key.
    """
    medians: dict[str, list[float]] = {}
    for figure in (figure for figures in keys for figure in figures):
        if figure.seconds and not figure.problem:
            medians.setdefault(figure.impl_id, []).append(figure.median)
    fit = {name: found for name, found in medians.items() if len(found) == len(keys)}
    if not fit:
        return Choice("", "no candidate may win at every size")
    scores = {name: math.exp(statistics.fmean(map(math.log, found))) for name, found in fit.items()}
    least = min(scores.values())
    chosen = next(name for name, score in scores.items() if score <= least * (1 + LEAST_GAIN))
    others = [(score, name) for name, score in scores.items() if name != chosen]
    if not others:
        return Choice(chosen, "all sizes together: the only one that may win")
    score, second = min(others)
    return Choice(chosen, f"all sizes together: {score / scores[chosen]:.2f} times as fast as {second}")
