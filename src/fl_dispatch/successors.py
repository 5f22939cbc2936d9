"""Which weight a step multiplies with after another one, so that a kernel can ask for it in time.

A host records one eager step, after it has loaded a model. A product asks with the weight that it has, and gets the
next one. The answer is a hint: no result depends on it.

Only weights of the recorded step follow others, so what a product asks for is multiplied with a moment later, by the
same step. A graph keeps the address, as it keeps that of its own products' weights: it is as long valid as they are.
So whoever moves weights has to capture graphs anew in any case; vLLM's sleep mode maps memory at the same addresses
before a step runs, and new weights are written into the old ones' memory. Outside graphs the tensor is asked for its
address in every call, and one that is gone is not found.
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
"""The weights of the step that is recorded; its thread alone adds to them."""


@contextmanager
def recorded() -> Iterator[None]:
    """Record the order of weights in a step, in place of any that was recorded before."""
    weights: list[Tensor] = []
    token = _recorded.set(weights)
    try:
        yield
    finally:
        _recorded.reset(token)
    _next.clear()
    for weight, other in pairwise(weights):
        if other.data_ptr() != weight.data_ptr():  # a first call may be tried twice
            _next[weight.data_ptr()] = weakref.ref(other)


def known() -> int:
    """How many recorded successors are still alive."""
    return sum(found() is not None for found in _next.values())


def after(weight: Tensor) -> Tensor | None:
    """The weight that follows, if it is known and still there; called for each product that asks."""
    if (weights := _recorded.get()) is not None:
        weights.append(weight)
        return None
    found = _next.get(weight.data_ptr())
    return None if found is None else found()
