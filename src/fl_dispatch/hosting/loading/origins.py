"""The origin of values in memory: the checkpoint's tensors in a storage, or those from which its values were made."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class Origin:
    """The tensors of a checkpoint from which values were made; ``dtype`` if they are one tensor's numbers."""

    names: frozenset[str]
    dtype: torch.dtype | None = None


NOTHING = Origin(frozenset())


class Storage:
    """The origins of one storage's bytes: of ranges, such as tensors in one buffer, or of all bytes.

    The ranges are disjoint and in order, so each look-up is a bisection.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # While it lives, no other storage has this one's address.
        self.kept = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.whole = NOTHING
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._names: list[frozenset[str]] = []

    def put(self, name: str, tensor: Tensor) -> None:
        """Record a tensor of the checkpoint. It replaces tensors in its range: a reader refilled its buffer.

        Tensors of exactly the same range stay, because they are one tensor under several names.
        """
        start, end = _span(tensor)
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        names = frozenset({name})
        if last - first == 1 and (self._starts[first], self._ends[first]) == (start, end):
            names |= self._names[first]
        for values, value in ((self._starts, start), (self._ends, end), (self._names, names)):
            values[first:last] = [value]  # type: ignore[list-item]

    def origin(self, tensor: Tensor) -> Origin:
        """Return the origin of a view; a tensor of the file may be read as another type with the same bytes."""
        if self._starts:
            first = int(tensor.storage_offset()) * tensor.element_size()
            index = bisect_right(self._ends, first)
            if index < len(self._starts) and self._starts[index] <= first:
                return Origin(self._names[index], tensor.dtype)
        return self.whole

    def made(self) -> frozenset[str]:
        """Return the tensors from which its values were made, if it lives and is not a reader's buffer."""
        dead = self._starts or self.kept.expired()  # type: ignore[no-untyped-call]
        return frozenset() if dead else self.whole.names


def key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + max(tensor.numel(), 1) * tensor.element_size()
