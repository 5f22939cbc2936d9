"""Search for a row's sequence in kernels over tiles of a batch's rows, so that grids do not depend on lengths."""

from __future__ import annotations

import triton
import triton.language as tl


def steps_of_search(requests: int) -> int:
    """Steps that :func:`sequence_of` needs to find one of ``requests`` sequences."""
    return max(0, requests - 1).bit_length()


@triton.jit
def sequence_of(row, starts, requests, steps):
    """Return the sequence of each row, that sequence's first row, and whether any sequence covers the row.

    Several sequences may begin at a row if all but the last of them are empty; it is the last one that has the row.
    """
    low = tl.zeros_like(row)
    high = low + (requests - 1)
    for _ in range(steps):
        middle = (low + high + 1) // 2
        begun = tl.load(starts + middle) <= row
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    start = tl.load(starts + low)
    return low, start, (row >= start) & (row < tl.load(starts + low + 1))
