"""The scores of an engine: for each position of each prompt the largest logits, and the distance of two runs.

A host returns log-probabilities of the likeliest tokens; a forced token's may not be the model's. Logits that differ by
a constant are the same distribution, so rows are compared up to a common shift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .prompts import TOP

Row = Mapping[str, float]
"""Token id, as text because rows are kept as JSON → log-probability up to the row's constant."""

CLIPPED = 1e6
"""The distance of a row without numbers, or without a common token with the other row."""


@dataclass(frozen=True)
class Scores:
    """The result of one run of all requests.

    Args:
        rows: request's label → its rows in the order of positions. A label says the round, the prompt and the phase.
        parts: the engine's own time for each round of requests, in seconds.
    """

    rows: Mapping[str, Sequence[Row]]
    parts: Sequence[float] = ()

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {label: list(rows) for label, rows in self.rows.items()}


def distance(first: Row, second: Row) -> float:
    """Return the largest difference of two rows' logits, up to a common shift.

    A token in only one row is compared with the least likely of the other row's likeliest tokens, because its own logit
    is unknown and no higher.
    """
    common = first.keys() & second.keys()
    if len(common) < 2 or not all(math.isfinite(row[token]) for row in (first, second) for token in common):
        return CLIPPED
    shift = sum(first[token] - second[token] for token in common) / len(common)
    apart = max(abs(first[token] - second[token] - shift) for token in common)
    for one, other, offset in ((first, second, -shift), (second, first, shift)):
        floor = sorted(other.values(), reverse=True)[:TOP][-1]
        beyond = (one[token] + offset - floor for token in one.keys() - other.keys())
        apart = max(apart, *(value for value in beyond if math.isfinite(value)), 0.0)
    return apart


@dataclass(frozen=True)
class Difference:
    """The distance of two runs.

    Args:
        largest: the largest distance of two rows.
        mean: mean over all rows.
        where: label and position of the largest.
        by_request: label → the largest distance in it.
    """

    largest: float
    mean: float
    where: str = ""
    by_request: Mapping[str, float] | None = None

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"largest": self.largest, "mean": self.mean, "where": self.where}


def difference(first: Scores, second: Scores) -> Difference:
    """Return the distance of two runs of the same requests; a missing request counts as the largest distance."""
    largest, where, every = 0.0, "", list[float]()
    by_request: dict[str, float] = {}
    for label in sorted(first.rows.keys() | second.rows.keys()):
        one, other = first.rows.get(label, ()), second.rows.get(label, ())
        apart = [distance(a, b) for a, b in zip(one, other, strict=False)]
        apart += [CLIPPED] * abs(len(one) - len(other))
        by_request[label] = max(apart, default=0.0)
        every += apart
        if by_request[label] > largest:
            largest = by_request[label]
            where = f"{label}, position {apart.index(largest)}"
    return Difference(largest, sum(every) / len(every) if every else 0.0, where, by_request)
