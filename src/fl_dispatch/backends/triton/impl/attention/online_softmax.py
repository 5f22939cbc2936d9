"""The plain kernels' online softmax in base 2, after flash attention (Dao, arXiv 2307.08691)."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def update(qk, m_i, l_i, qk_scale, seen, MASKED: tl.constexpr, EMPTY_ROWS: tl.constexpr = False):
    """Return weights ``p`` of a tile of scores, the rows' new maximum ``m_i`` and sum ``l_i``, and ``alpha``, which
    rescales the sums before the tile.

    With ``MASKED``, only scores that are ``seen`` count. A row that has seen no key yet adds arbitrary numbers to its
    sums, because ``alpha`` is 0 as soon as the row sees a key. With ``EMPTY_ROWS`` it adds 0, so a row that never sees
    a key has ``l_i == 0``.
    """
    if MASKED:
        # Finite, because the difference of two infinities would be NaN in a row that has seen no key yet. Never
        # multiplied by the scale, because a fused multiply-add would subtract the rounded product from the exact one.
        qk = tl.where(seen, qk * qk_scale, -1e30)
        qk_scale = 1.0
    m_new = tl.maximum(m_i, tl.max(qk, axis=1) * qk_scale)
    alpha = tl.exp2(m_i - m_new)
    p = tl.exp2(qk * qk_scale - m_new[:, None])
    if EMPTY_ROWS:
        p = tl.where(seen, p, 0.0)
    return p, m_new, l_i * alpha + tl.sum(p, axis=1), alpha


@triton.jit
def store_part(partial, statistics, index, column, acc, m_i, l_i, valid, inside, WIDTH: tl.constexpr):
    """Write one program's partial sums, maxima and weights of rows at ``index``; ``_combine`` adds up all programs'."""
    tl.store(partial + index[:, None] * WIDTH + column[None, :], acc, mask=inside)
    tl.store(statistics + index * 2, m_i, mask=valid)
    tl.store(statistics + index * 2 + 1, l_i, mask=valid)
