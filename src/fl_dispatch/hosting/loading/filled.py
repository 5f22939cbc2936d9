"""The filled part of a parameter: boxes of its elements, however they are joined."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""The range of indices in each dimension."""


class Place:
    """A parameter or buffer while tensors are loaded: the boxes of elements that were written, and their tensors."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.shape, self.strides = name, tuple(tensor.shape), tensor.stride()
        self.offset, self.numel, self.dtype = int(tensor.storage_offset()), tensor.numel(), tensor.dtype
        self.boxes: set[Box] = set()
        self.scattered: Tensor | None = None
        self.names: set[str] = set()

    def write(self, view: Tensor, names: frozenset[str]) -> None:
        """Record a write into a view. A loader may compute a parameter from what it has written into it."""
        if (box := self._box(view)) is not None:
            self.boxes.add(box)
        else:
            self._scatter(view)
        self.names |= names

    def _all(self) -> Box:
        return tuple((0, size) for size in self.shape)

    def _box(self, view: Tensor) -> Box | None:
        """Return the box of a parameter that a view covers; ``None`` if it is no box."""
        rest, found = int(view.storage_offset()) - self.offset, [(0, 1)] * len(self.shape)
        if view.element_size() != self.dtype.itemsize or rest < 0:
            return None
        by_stride = sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim])
        for dim in by_stride:
            if self.shape[dim] > 1:
                start, rest = divmod(rest, self.strides[dim]) if self.strides[dim] else (0, rest)
                found[dim] = start, start + 1
        if rest:
            return None
        free = [dim for dim in by_stride if self.shape[dim] > 1]
        for size, stride in zip(view.shape, view.stride(), strict=True):
            if size == 1:
                continue
            along = next((dim for dim in free if self.strides[dim] == stride), None)
            if along is None or found[along][0] + size > self.shape[along]:
                return None
            free.remove(along)
            found[along] = found[along][0], found[along][0] + size
        return tuple(found)

    def _scatter(self, view: Tensor) -> None:
        """Record a view that is not a box, such as a view of flat elements or of bytes."""
        if self.scattered is None:
            self.scattered = torch.zeros(self.offset + _reach(self.shape, self.strides), dtype=torch.bool, device="cpu")
        shape, strides, offset = tuple(view.shape), view.stride(), view.storage_offset()
        if view.element_size() != self.dtype.itemsize:
            first = offset * view.element_size() // self.dtype.itemsize
            end = -(-(offset + _reach(shape, strides)) * view.element_size() // self.dtype.itemsize)
            shape, strides, offset = (end - first,), (1,), first
        if offset + _reach(shape, strides) <= len(self.scattered):
            self.scattered.as_strided(shape, strides, offset).fill_(True)

    def is_whole(self) -> bool:
        """Whether every element was written."""
        if self._all() in self.boxes or self.numel == 0:
            return True
        if self.scattered is not None:
            written = self.scattered.as_strided(self.shape, self.strides, self.offset)
            for box in self.boxes:
                written[tuple(slice(*ends) for ends in box)] = True
            return bool(written.all())
        edges = [
            sorted({0, size, *(edge for box in self.boxes for edge in box[dim])}) for dim, size in enumerate(self.shape)
        ]
        places = [{edge: index for index, edge in enumerate(each)} for each in edges]
        cells = torch.zeros([len(each) - 1 for each in edges], dtype=torch.bool, device="cpu")
        for box in self.boxes:
            cells[tuple(slice(place[start], place[end]) for place, (start, end) in zip(places, box, strict=True))] = (
                True
            )
        return bool(cells.all())


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from a view's first one to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
