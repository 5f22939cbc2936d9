"""Confidence intervals of a median, for any distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence


def interval(values: Sequence[float], confidence: float = 0.9) -> tuple[float, float]:
    """Return the shortest symmetric interval between ordered values that contains the median with this confidence.

    The ``k``-th smallest and largest of ``n`` contain it with probability ``1 - 2 * P(Binomial(n, 1/2) < k)`` (David
    and Nagaraja, Order Statistics, section 7.1). The interval of too few values is from the smallest to the largest.
    """
    ordered, n = sorted(values), len(values)
    outside, rank = 0.5**n, 0
    while rank + 1 < n // 2 and 1 - 2 * (outside + math.comb(n, rank + 1) * 0.5**n) >= confidence:
        rank += 1
        outside += math.comb(n, rank) * 0.5**n
    return ordered[rank], ordered[-1 - rank]
