"""Whether two tensors share an element's memory, exactly for any strides: interleaved slices share none."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

KEPT_ANSWERS = 4096
Extent = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Bytes of an element; sizes; strides, in elements."""


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory; most do not even share a storage."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    return _bytes_overlap(other.data_ptr() - one.data_ptr(), _extent(one), _extent(other))


def _extent(tensor: Tensor) -> Extent:
    return tensor.element_size(), tuple(tensor.shape), tensor.stride()


@lru_cache(KEPT_ANSWERS)
def _bytes_overlap(distance: int, one: Extent, other: Extent) -> bool:
    """Whether two tensors share bytes; the other one begins ``distance`` bytes after the first.

    Elements ``i`` and ``j`` overlap if ``i * strides`` of the first and ``distance + j * strides`` of the other differ
    by less than an element. The search adds terms from the largest stride to the smallest, and drops partial sums that
    the smaller strides cannot compensate.
    """
    terms: dict[int, list[int]] = {}
    for (size, shape, strides), sign in ((one, 1), (other, -1)):
        if 0 in shape:
            return False
        for count, stride in zip(shape, strides, strict=True):
            if count > 1 and stride:
                bounds = terms.setdefault(stride * size, [0, 0])
                bounds[sign > 0] += sign * (count - 1)
    steps = sorted(((step, low, high) for step, (low, high) in terms.items()), reverse=True)
    # The remaining distance: the other's element begins before the first one ends, and ends after the first one begins.
    low_end, high_end = 1 - other[0], one[0] - 1
    left = {distance}
    for index, (step, low, high) in enumerate(steps):
        least = low_end + sum(smaller * first for smaller, first, _ in steps[index + 1 :])
        most = high_end + sum(smaller * last for smaller, _, last in steps[index + 1 :])
        left = {
            rest - step * times
            for rest in left
            for times in range(max(low, -((most - rest) // step)), min(high, (rest - least) // step) + 1)
        }
    return any(low_end <= rest <= high_end for rest in left)
