"""Memory for waiting KV caches, as a buddy system in main memory or on a device.

A piece has a power of two of units. A larger piece is halved until it fits, and two free halves merge again, so that
taking and releasing pieces in any order leaves no gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_dispatch.devices import detect_device

UNIT = 4096


@dataclass(frozen=True)
class Piece:
    """Memory of a pool: ``bytes`` has the size that was asked for."""

    begin: int
    order: int
    bytes: Tensor
    home: BuddyPool

    def give(self) -> None:
        """Return the piece to its pool."""
        self.home.give(self)


def queues(memory: Tensor) -> bool:
    """Whether the memory is an accelerator's, so that work on it is queued in a stream."""
    spec = detect_device()
    return spec.accelerator and memory.device.type == spec.torch_type


class BuddyPool:
    """A buddy system in one piece of memory. Not thread-safe: its owner holds a lock.

    Args:
        capacity: bytes, rounded down to whole units. The system allocates them on first write.
        unit: bytes of the smallest piece.
        device: the memory's device, by default main memory. A device allocates all of it at once.
    """

    def __init__(self, capacity: int, unit: int = UNIT, device: torch.device | None = None) -> None:
        self._unit = unit
        units = capacity // unit
        self._memory = torch.empty(units * unit, dtype=torch.uint8, device=device)
        if queues(self._memory):  # the previous owner may be at work, and other streams will use it
            torch.cuda.current_stream(device).synchronize()
        self._free: list[set[int]] = [set() for _ in range(units.bit_length())]
        self._roots: list[tuple[int, int]] = []
        begin = 0
        for order in reversed(range(units.bit_length())):  # the largest powers of two that make up the capacity
            if units >> order & 1:
                self._free[order].add(begin)
                self._roots.append((begin, order))
                begin += 1 << order
        self.taken = 0

    @property
    def capacity(self) -> int:
        """Return the total number of bytes."""
        return len(self._memory)

    def take(self, size: int) -> Piece | None:
        """Take memory for ``size`` bytes; ``None`` if no single free piece is large enough."""
        wanted = max(0, -(-size // self._unit) - 1).bit_length()
        found = next((order for order in range(wanted, len(self._free)) if self._free[order]), None)
        if found is None:
            return None
        begin = self._free[found].pop()
        for order in reversed(range(wanted, found)):
            self._free[order].add(begin + (1 << order))
        self.taken += self._unit << wanted
        start = begin * self._unit
        return Piece(begin, wanted, self._memory[start : start + size], self)

    def give(self, piece: Piece) -> None:
        """Take back a piece that is not used any more."""
        begin, order = piece.begin, piece.order
        self.taken -= self._unit << order
        while (begin, order) not in self._roots:
            buddy = self._buddy(begin, order)
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            begin, order = min(begin, buddy), order + 1
        self._free[order].add(begin)

    def _buddy(self, begin: int, order: int) -> int:
        root = next(start for start, size in self._roots if start <= begin < start + (1 << size))
        return root + ((begin - root) ^ (1 << order))
