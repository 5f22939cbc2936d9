"""Benchmark cases: the shapes that a declaration names, as far as a call takes a short time on this device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import OPERATORS, Operator, Place, Work
from .rates import Rates

TOKENS = (1, 16, 256, 1024, 4096, 16384)
HIDDEN = (4096, 5120, 7168, 8192)
MOST_CALL_SECONDS = 1e-3
"""Seconds of a call at the device's rates beyond which a case is skipped unless its size is requested."""
MOST_MAKING_SECONDS = 0.03
"""Seconds to copy the arguments beyond which a case is skipped, because arguments are made many times."""


@dataclass(frozen=True)
class Case:
    """One shape of one operator in one place.

    Args:
        op_name: the operator.
        label: distinguishes the case from the operator's others, such as ``with residual``.
        tokens: new tokens of the call.
        width: the operator's width: hidden size, or the context's length for attention; 0 for a sample.
        make: makes arguments in new memory.
        plan: makes them without memory, for callers that only need shapes.
    """

    op_name: str
    label: str
    tokens: int
    width: int
    make: Callable[[], tuple[Any, ...]]
    plan: Callable[[], tuple[Any, ...]] | None = None

    @property
    def least(self) -> tuple[Work, int]:
        """Return the least work of a call, and the bytes of all its arguments."""
        operator = OPERATORS[self.op_name]
        assert operator.work is not None
        args = operator.bind((self.plan or self.make)(), {})
        tensors = {id(arg.untyped_storage()): arg for arg in args if isinstance(arg, Tensor)}
        return operator.work(*args), sum(arg.untyped_storage().nbytes() for arg in tensors.values())

    def is_short(self, rates: Rates) -> bool:
        """Whether a device with these rates can run it often in a short time."""
        work, size = self.least
        call, making = rates.floor_s(work.bytes_moved, work.operations), size / rates.copy_bytes_per_s
        return call <= MOST_CALL_SECONDS and making <= MOST_MAKING_SECONDS


def cases(operator: Operator, place: Place, tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Case]:
    """Return the cases of an operator; without declared shapes, its serving samples.

    Args:
        operator: the declaration.
        place: the place of the arguments.
        tokens, hidden: sizes of row-wise operators. Attention has its own batches and contexts, with at most the
            largest of ``tokens`` keys in all (for decode 32 times that).
    """
    if operator.shapes is None:
        yield from sampled(operator, place)
        return
    nowhere = Place(place.dtype, torch.device("meta"))
    for shape in operator.shapes(tokens, hidden):
        make, plan = (lambda s=shape, p=p: s.make(p) for p in (place, nowhere))
        yield Case(operator.name, shape.label, shape.tokens, shape.width, make, plan)


def sampled(operator: Operator, place: Place, seed: int = 0) -> Iterator[Case]:
    """Yield the serving samples of an operator as cases."""
    assert operator.samples is not None
    for sample in operator.samples(place.dtype, place.device, torch.Generator().manual_seed(seed)):
        if sample.serving:
            tokens = operator.workload(*operator.bind(sample.args, {})).tokens
            yield Case(operator.name, sample.label, tokens, 0, lambda args=sample.args: args)  # type: ignore[misc]


def short_cases(
    operator: Operator, place: Place, rates: Rates, hidden: Sequence[int] = HIDDEN
) -> tuple[list[Case], int]:
    """Return the cases of default numbers of tokens that are short here, and the number of others.

    An operator without a short case gets its serving samples.
    """
    everything = list(cases(operator, place, TOKENS, hidden))
    short = [case for case in everything if case.is_short(rates)]
    return short or list(sampled(operator, place)), len(everything) - len(short)
