"""The rates that a device reaches in this run, the yardstick of benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..devices import device_of
from .timing import Call, Clock

MOST_SETS = 64
MOST_COPIED, PAGE = 1 << 28, 4096  # larger copies, and copies of fragmented pages, may use a slower path
CACHE_BYTES = 64 << 20
"""The assumed cache size of a device that does not report one."""


def sets_to_rotate(device: torch.device, size: int) -> int:
    """Return the number of sets of ``size`` bytes that together are twice the device's cache, at most 64."""
    cache = device_of(device.type).cache_bytes(device.index or 0) or CACHE_BYTES
    return min(MOST_SETS, max(1, -(-2 * cache // max(1, size))))


@dataclass(frozen=True)
class Rates:
    """The device's best rates.

    Args:
        copy_bytes_per_s: bytes read plus bytes written, in the fastest of some copies larger than the caches.
        operations_per_s: floating-point operations of a large matrix product in the dtype measured.
    """

    copy_bytes_per_s: float
    operations_per_s: float

    def floor_s(self, bytes_moved: int, operations: int) -> float:
        """The time that no implementation beats: all bytes at the copy rate, or all operations at the matrix rate."""
        return max(bytes_moved / self.copy_bytes_per_s, operations / self.operations_per_s)


class Yardstick:
    """The rates that the device reaches, measured with the implementations' clock.

    Args:
        clock: the device's clock.
        dtype: dtype of the matrix product.
    """

    def __init__(self, clock: Clock, dtype: torch.dtype) -> None:
        self.clock = clock
        self._copies: dict[int, float] = {}
        large = clock.spec.accelerator
        size = 8192 if large else 1024
        left, right = (torch.randn(size, size, device=clock.device, dtype=dtype) for _ in range(2))
        clock.warm_up(lambda: left @ right)
        product = clock.time([lambda: left @ right])
        sizes = (1 << 28, 1 << 29) if large else (1 << 27,)
        copy_rate = max(size / self.copy(size) for size in sizes)
        self.rates = Rates(copy_rate, 2 * size**3 / product.median)

    def copy(self, bytes_moved: int) -> float:
        """Return the copy time in seconds for ``bytes_moved``, read and written together, with a cold cache."""
        half = -(-bytes_moved // 2 // PAGE) * PAGE
        if half > MOST_COPIED:
            return self.copy(2 * MOST_COPIED) * half / MOST_COPIED
        if half not in self._copies:
            sets = sets_to_rotate(self.clock.device, 2 * half)
            source = torch.randint(0, 255, (sets, half), device=self.clock.device, dtype=torch.uint8)
            target = torch.empty_like(source)

            def copy(index: int) -> Call:
                return lambda: target[index].copy_(source[index])

            self._copies[half] = self.clock.time([copy(index) for index in range(sets)]).median
        return self._copies[half]
