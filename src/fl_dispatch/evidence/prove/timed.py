"""The arguments of a timed question: calls of one case, each with its own numbers, made from a seed.

The process that makes the calls and the one that compares a result make the same arguments on the same device, so no
argument is transported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import OPERATORS, Place
from ..cases import HIDDEN, TOKENS, Case, cases, sampled


def storages_of(args: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Return the memory of arguments, each once, in their order."""
    found = {arg.untyped_storage().data_ptr(): arg.untyped_storage() for arg in args if isinstance(arg, Tensor)}
    return list(found.values())


@dataclass(frozen=True)
class Timed:
    """A case by name, as one process tells another.

    Args:
        op_name: the operator.
        dtype: the dtype, without ``torch.``.
        label, tokens, width: those of the :class:`~fl_dispatch.evidence.cases.Case`.
    """

    op_name: str
    dtype: str
    label: str
    tokens: int
    width: int

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype) -> Timed:
        """Return the name of a case."""
        return cls(case.op_name, str(dtype).removeprefix("torch."), case.label, case.tokens, case.width)

    @property
    def words(self) -> tuple[str, str, int, int]:
        """Return it without the operator, which a process knows."""
        return self.dtype, self.label, self.tokens, self.width

    def calls(self, device: torch.device, seed: int, count: int = 1) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of calls; the first is of this seed, the next of the next one."""
        operator, place = OPERATORS[self.op_name], Place(getattr(torch, self.dtype), device)
        declared = cases(operator, place, TOKENS, HIDDEN) if operator.shapes else ()
        wanted = (self.label, self.tokens, self.width)
        case = next((one for one in declared if (one.label, one.tokens, one.width) == wanted), None)
        for number in range(seed, seed + count):
            torch.manual_seed(number)
            made = case or next(one for one in sampled(operator, place, number) if one.label == self.label)
            yield operator.bind(made.make(), {})
