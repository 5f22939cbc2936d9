"""The plain kernels' online softmax in base 2, after flash attention (Dao, arXiv 2307.08691)."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def update(qk, m_i, l_i, qk_scale, seen, MASKED: tl.constexpr, EMPTY_ROWS: tl.constexpr = False):
    """Return weights ``p`` of a tile of scores, the rows' new maximum ``m_i`` and sum ``l_i``, and ``alpha``, which
    rescales the sums before the tile.

    With ``MASKED`` only the scores count that are ``seen``. A row that has seen nothing yet adds to its sums all the
    same, because ``alpha`` is 0 as soon as it sees a key. With ``EMPTY_ROWS`` it adds 0, so that a row which never sees
    one can be recognized by ``l_i``.
    """
    if MASKED:
        # Finite, so that a row which sees nothing yet has no NaN. It must not meet the scale, because a fused
        # multiply-add of it and of its rounded product would be far from 0.
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
    """Write what one of several programs has found for its rows, at ``index``, for ``_combine`` to add up."""
    tl.store(partial + index[:, None] * WIDTH + column[None, :], acc, mask=inside)
    tl.store(statistics + index * 2, m_i, mask=valid)
    tl.store(statistics + index * 2 + 1, l_i, mask=valid)
