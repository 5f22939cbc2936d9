"""The weight that a step multiplies with next, so that a kernel can prefetch it.

A host records one eager step after it has loaded a model. A matrix product passes its weight and gets the next one. The
answer is a hint: no result depends on it.

Only weights of the recorded step have successors, so a prefetched weight is used a moment later in the same step. A
graph keeps a successor's address just as it keeps the addresses of its own weights, and both stay valid for the same
time. Code that moves weights has to capture graphs again in any case. vLLM's sleep mode maps memory at the same
addresses before a step runs, and new weights are written into the old memory. Outside graphs each call reads the
tensor's address, and a tensor that is gone is not found.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

from torch import Tensor

_next: dict[int, weakref.ref[Tensor]] = {}
"""A weight's address → the weight that follows."""
_recorded: ContextVar[list[Tensor] | None] = ContextVar("recorded", default=None)
"""The weights of the step that is being recorded; only its thread adds to them."""


@contextmanager
def recorded() -> Iterator[None]:
    """Record the order of weights in a step, replacing an earlier record."""
    weights: list[Tensor] = []
    token = _recorded.set(weights)
    try:
        yield
    finally:
        _recorded.reset(token)
    _next.clear()
    for weight, other in pairwise(weights):
        if other.data_ptr() != weight.data_ptr():  # a first call may run twice
            _next[weight.data_ptr()] = weakref.ref(other)


def known() -> int:
    """Return the number of recorded successors that are still alive."""
    return sum(found() is not None for found in _next.values())


def after(weight: Tensor) -> Tensor | None:
    """Return the weight that follows, or ``None``; called for each product that prefetches."""
    if (weights := _recorded.get()) is not None:
        weights.append(weight)
        return None
    found = _next.get(weight.data_ptr())
    return None if found is None else found()
