"""Exhaustive cases: ``make test-all`` runs all of them, and ``make test`` a sample.

The commit's hash selects the sample, so over time all cases run, and a run can be repeated.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ALL = "all"


@cache
def seed() -> str:
    """Return ``FL_SAMPLE`` if it is set ("all" or the hash of a commit), else the hash of this checkout's commit."""
    if given := os.environ.get("FL_SAMPLE"):
        return given
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "no commit"


def drawn(cases: Sequence[T], count: int, what: str) -> list[T]:
    """Return ``count`` of the cases in their order, or all of them; ``what`` makes draws for one commit differ."""
    if seed() == ALL or count >= len(cases):
        return list(cases)
    chosen = random.Random(f"{seed()} {what}").sample(range(len(cases)), count)
    return [cases[index] for index in sorted(chosen)]


def fuzz(sample: int, exhaustive: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return settings of Hypothesis: ``sample`` examples selected by the commit, or ``exhaustive`` random ones."""
    import hypothesis

    everything = seed() == ALL
    settings = hypothesis.settings(max_examples=exhaustive if everything else sample, deadline=None, **options)
    drawn_by = (lambda test: test) if everything else hypothesis.seed(seed())
    return lambda test: drawn_by(settings(test))
