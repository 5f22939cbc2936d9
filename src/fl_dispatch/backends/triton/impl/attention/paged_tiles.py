"""Tiles of attention over a paged cache: which keys a program takes, and its loop over them."""

from __future__ import annotations

import triton
import triton.language as tl

from .online_softmax import LOG2E, update


@triton.jit
def _span(length, new, first, tokens, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the range of keys that some query of a program sees: from a multiple of ``BLOCK_N`` up to the end.

    Args:
        length, new: keys and new tokens of the request.
        first, tokens: the program's first query among the new tokens, and its number of queries.
    """
    begin = length - new + first
    last = tl.minimum(begin + tokens, length) - 1
    low = 0
    high = length
    if WINDOW > 0:
        low = tl.maximum(begin - WINDOW + 1, 0)
        if not CAUSAL:
            high = tl.minimum(length, last + WINDOW)
    if CAUSAL:
        high = last + 1
    return low // BLOCK_N * BLOCK_N, high


@triton.jit
def _share(low, high, splits, BLOCK_N: tl.constexpr):
    """Return the number of keys for each of ``splits`` programs, a multiple of ``BLOCK_N``."""
    return tl.cdiv(tl.cdiv(high - low, splits), BLOCK_N) * BLOCK_N


@triton.jit
def _page(table, tile, column, first_seen, length, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Load the block numbers of a tile of keys: one if a block holds the whole tile, otherwise one for each key.

    Call it one tile ahead, because the keys' addresses wait for these loads.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        page = tl.load(table + tile // BLOCK_SIZE, mask=tile < length, other=0)
    else:
        position = tile + column
        inside = (position >= first_seen) & (position < length)
        page = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0)
    return page


@triton.jit
def _tiles(
    acc,
    m_i,
    l_i,
    q,
    key,
    value,
    key_scales,
    value_scales,
    table,
    start,
    stop,
    first_seen,
    length,
    position,
    slope,
    SCALE,
    SOFTCAP,
    KEY_BLOCK,
    KEY_SLOT,
    KEY_DIM,
    VALUE_BLOCK,
    VALUE_SLOT,
    VALUE_DIM,
    KEY_SCALES_BLOCK,
    KEY_SCALES_SLOT,
    VALUE_SCALES_BLOCK,
    VALUE_SCALES_SLOT,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Attend to the keys from ``start``, a multiple of ``BLOCK_N``, up to ``stop``.

    Without ``MASKED``, every query sees all of these keys. ``SCALED``: each key and value has a scale.
    """
    column = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    dim_v = tl.arange(0, BLOCK_DV)
    ahead = _page(table, start, column, first_seen, length, BLOCK_N, BLOCK_SIZE)
    for tile in tl.range(start, stop, BLOCK_N):
        key_position = tile + column
        if MASKED:
            inside = (key_position >= first_seen) & (key_position < length)
        page = ahead
        ahead = _page(table, tile + BLOCK_N, column, first_seen, length, BLOCK_N, BLOCK_SIZE)
        if not NARROW:
            page = page.to(tl.int64)
        slot = key_position % BLOCK_SIZE
        key_row = page * KEY_BLOCK + slot * KEY_SLOT
        value_row = page * VALUE_BLOCK + slot * VALUE_SLOT
        keys = key + (key_row[None, :] + dim[:, None] * KEY_DIM)
        values = value + (value_row[:, None] + dim_v[None, :] * VALUE_DIM)
        if MASKED:
            k = tl.load(keys, mask=inside[None, :] & (dim[:, None] < DIM), other=0.0)
            v = tl.load(values, mask=inside[:, None] & (dim_v[None, :] < DIM_V), other=0.0)
        else:
            if DIM == BLOCK_D:
                k = tl.load(keys)
            else:
                k = tl.load(keys, mask=dim[:, None] < DIM, other=0.0)
            if DIM_V == BLOCK_DV:
                v = tl.load(values)
            else:
                v = tl.load(values, mask=dim_v[None, :] < DIM_V, other=0.0)
        qk = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        if SCALED:
            key_unit = key_scales + page * KEY_SCALES_BLOCK + slot * KEY_SCALES_SLOT
            value_unit = value_scales + page * VALUE_SCALES_BLOCK + slot * VALUE_SCALES_SLOT
            if MASKED:
                k_scale = tl.load(key_unit, mask=inside, other=0.0)
                v_scale = tl.load(value_unit, mask=inside, other=0.0)
            else:
                k_scale, v_scale = tl.load(key_unit), tl.load(value_unit)
            qk *= k_scale[None, :]
            # The weights do not get the values' scale, because a small one would make them subnormal in float16.
            v = (v.to(tl.float32) * v_scale[:, None]).to(q.dtype)
        qk_scale = LOG2E
        if CAPPED:
            qk = SOFTCAP * (2.0 * tl.sigmoid(qk * (2.0 * SCALE / SOFTCAP)) - 1.0)
        elif ALIBI:
            qk = qk * SCALE
        else:
            qk_scale = SCALE * LOG2E  # one multiply-add in the exponent applies it
        if ALIBI or MASKED:
            distance = position[:, None] - key_position[None, :]
        if ALIBI:
            qk -= slope[:, None] * tl.abs(distance).to(tl.float32)
        seen = True
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (distance >= 0)
            if WINDOW > 0:
                seen = seen & (tl.abs(distance) < WINDOW)
        p, m_i, l_i, alpha = update(qk, m_i, l_i, qk_scale, seen, MASKED)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_i, l_i
