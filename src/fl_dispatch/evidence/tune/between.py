"""Proofs of winners at sizes that were not measured but that their rules cover: between measured sizes, and above."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...manager import OpManager
from ...types import OpImpl
from ..cases import Case
from ..timing import Clock
from .calls import Key, TunedCase
from .race import is_provable, prove

DRAWN = 2
"""Drawn sizes of each call between two measured ones, besides the ends."""
ABOVE = 2
"""Multiple of the largest measured size up to which sizes above it are drawn."""


@dataclass
class Served:
    """The comparisons of a key's winner with the reference at sizes that the key's rule covers.

    Args:
        proven: numbers of tokens at which it is right.
        declined: numbers of tokens that it does not take, so that the next implementation serves them.
        too_large: numbers of tokens of shapes that the reference cannot compute.
        problem: why it must not serve these sizes, or empty.
    """

    proven: list[int] = field(default_factory=list)
    declined: list[int] = field(default_factory=list)
    too_large: list[int] = field(default_factory=list)
    problem: str = ""

    def as_data(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def sizes_of(cases: Sequence[TunedCase], key: Key, above: bool, seed: int) -> Iterator[Case]:
    """Yield shapes that a key's rule covers and that were not measured: the ends, and drawn ones between.

    Args:
        cases: the measured shapes of the key's operator.
        key: the key.
        above: whether to yield the sizes above the largest measured one.
        seed: the seed of the drawn sizes.
    """
    alike = [one for one in cases if (one.key.dtype, one.key.phase) == (key.dtype, key.phase)]
    below = max((one.key.tokens for one in alike if one.key.tokens < key.tokens), default=0)
    for label in dict.fromkeys(one.case.label for one in alike):
        rows = [one for one in alike if one.case.label == label]
        most = max(rows, key=lambda one: one.step)
        heads = most.key.tokens // most.step  # each counts as a token
        near = min((one.key.tokens for one in rows if one.key.tokens >= key.tokens), default=most.key.tokens)
        first, last = below // heads + 1, min(key.tokens // heads, ABOVE * most.step)
        if above:
            first, last = max(key.tokens // heads, most.step) + 1, ABOVE * most.step
        free = [step for step in range(first, last + 1) if step not in {one.step for one in rows}]
        drawn = random.Random(f"{seed} {key}").sample(free[1:-1], min(DRAWN, len(free[1:-1])))
        for step in sorted({*free[:1], *drawn, *free[-1:]}):
            yield from (one.at(step) for one in rows if one.key.tokens == near)


def prove_sizes(manager: OpManager, impl: OpImpl, shapes: Iterable[Case], clock: Clock, dtype: torch.dtype) -> Served:
    """Compare an implementation with the reference at these shapes, until it is wrong at one."""
    found = Served()
    for case in shapes:
        if not is_provable(case, clock.spec.accelerator):
            found.too_large.append(case.tokens)
            continue
        (outcome,) = prove(manager, [impl], case, dtype, clock)
        if outcome.problem.startswith("declines"):
            found.declined.append(case.tokens)
        elif outcome.problem:
            found.problem = outcome.problem
            break
        else:
            found.proven.append(case.tokens)
    return found
