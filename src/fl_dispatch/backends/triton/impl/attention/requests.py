"""Find the request of a token, for kernels in Triton and in Gluon with a program for each token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_of(query_starts, token, requests, STEPS: tl.constexpr):
    """Return a token's request, found in ``STEPS`` steps of bisection; the last request for tokens after it."""
    low = 0
    high = requests
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        begins = tl.load(query_starts + middle) <= token
        inside = (high - low) > 1
        low = tl.where(inside & begins, middle, low)
        high = tl.where(inside & (begins == 0), middle, high)
    return low


def steps(requests: int) -> int:
    """Steps of a binary search over ``requests``, rounded up to an even number, so that few kernels are compiled."""
    return max(2, (max(0, requests - 1).bit_length() + 1) // 2 * 2)
