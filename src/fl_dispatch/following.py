"""Which weight a step multiplies with after another one, so that a kernel can ask for it in time.

A host records one eager step, after it has loaded a model. Products of one row say which weight they have, and learn
which one follows. That is a hint: no result depends on it.

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

from torch import Tensor

_next: dict[int, weakref.ref[Tensor]] = {}
"""A weight's address → the weight that follows."""
_recorded: list[Tensor] | None = None


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """Have the weights of a step in their order, which is known from then on."""
    global _recorded
    for address in [address for address, found in _next.items() if found() is None]:
        del _next[address]
    weights: list[Tensor] = []
    _recorded = weights
    try:
        yield weights
    finally:
        _recorded = None
    addresses = [weight.data_ptr() for weight in weights]
    for address, weight in zip(addresses, weights[1:], strict=False):
        if weight.data_ptr() != address:  # a first call may be tried twice
            _next[address] = weakref.ref(weight)


def after(weight: Tensor) -> Tensor | None:
    """The weight that follows, if it is known and still there; called for each product of one row."""
    if _recorded is not None:
        _recorded.append(weight)
        return None
    found = _next.get(weight.data_ptr())
    return None if found is None else found()
