"""Rotary position embedding of query and key in one launch, with a program for some heads of a token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported

from ..launch import power_of_two

TILE = 1024
"""Pairs that a program rotates."""


@triton.jit
def turned(
    read,
    cos,
    sin,
    position,
    head,
    COS_ROW,
    SIN_ROW,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Return the first and second elements of the rotated pairs of a token's heads.

    ``read``: pointers to the heads, ``[BLOCK_HEADS, 1]``; results are ``[BLOCK_HEADS, BLOCK_HALF]``.

    The position is loaded last, because the loads of the table wait for it.
    """
    wide: tl.constexpr = tl.float64 if read.dtype.element_ty == tl.float64 else tl.float32
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        inside_both = (head < HEADS) & (column < 2 * HALF)
        both = tl.load(read + column, mask=inside_both, other=0.0, eviction_policy="evict_last").to(wide)
        a, b = tl.split(tl.reshape(both, (BLOCK_HEADS, BLOCK_HALF, 2)))
    else:
        inside = (head < HEADS) & (pair < HALF)
        a = tl.load(read + pair, mask=inside, other=0.0, eviction_policy="evict_last").to(wide)
        b = tl.load(read + HALF + pair, mask=inside, other=0.0, eviction_policy="evict_last").to(wide)
    place = tl.load(position).to(tl.int64)
    c = tl.load(cos + place * COS_ROW + pair, mask=pair < HALF, other=0.0).to(wide)
    s = tl.load(sin + place * SIN_ROW + pair, mask=pair < HALF, other=0.0).to(wide)
    return a * c - b * s, b * c + a * s


@triton.jit
def put(
    write,
    DIM_STRIDE,
    x,
    y,
    inside,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Store pairs to the heads at ``write``; ``inside`` ``[BLOCK_HEADS, 1]``: whether each head exists."""
    kind = write.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        both = tl.reshape(tl.join(x, y), (BLOCK_HEADS, 2 * BLOCK_HALF))
        tl.store(write + column * DIM_STRIDE, both.to(kind), mask=inside & (column < 2 * HALF))
    else:
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        tl.store(write + pair * DIM_STRIDE, x.to(kind), mask=inside & (pair < HALF))
        tl.store(write + (HALF + pair) * DIM_STRIDE, y.to(kind), mask=inside & (pair < HALF))


@triton.jit
def rotate(
    source,
    target,
    cos,
    sin,
    position,
    first_head,
    COS_ROW,
    SIN_ROW,
    SOURCE_STRIDE,
    TARGET_STRIDE,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate the heads of a token from ``first_head`` on."""
    head = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    read, write = source + head * SOURCE_STRIDE, target + head * TARGET_STRIDE
    x, y = turned(
        read, cos, sin, position, head, COS_ROW, SIN_ROW, HEADS, HALF, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF
    )  # fmt: skip
    put(write, 1, x, y, head < HEADS, HALF, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF)
    if COPY and DIM > 2 * HALF:
        column = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        inside = (head < HEADS) & (column < DIM)
        tl.store(write + column, tl.load(read + column, mask=inside), mask=inside)


@triton.jit
def _rotary(
    query,
    key,
    cos,
    sin,
    positions,
    query_out,
    key_out,
    QUERY_TOKEN,
    QUERY_HEAD,
    KEY_TOKEN,
    KEY_HEAD,
    QUERY_OUT_TOKEN,
    QUERY_OUT_HEAD,
    KEY_OUT_TOKEN,
    KEY_OUT_HEAD,
    COS_ROW,
    SIN_ROW,
    POSITION_STRIDE,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    query_heads: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS * BLOCK_HEADS
    blocks: tl.constexpr = (query_heads + KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * BLOCK_HEADS
    position = positions + token * POSITION_STRIDE
    if head < query_heads:
        rotate(
            query + token * QUERY_TOKEN, query_out + token * QUERY_OUT_TOKEN, cos, sin, position,
            head, COS_ROW, SIN_ROW,
            QUERY_HEAD, QUERY_OUT_HEAD, HEADS, DIM, HALF, INTERLEAVED, COPY, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        rotate(
            key + token * KEY_TOKEN, key_out + token * KEY_OUT_TOKEN, cos, sin, position,
            head - query_heads, COS_ROW, SIN_ROW,
            KEY_HEAD, KEY_OUT_HEAD, KV_HEADS, DIM, HALF, INTERLEAVED, COPY, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


_launch = Launcher(_rotary)


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """See :data:`fl_dispatch.ops.rotary.rotary_embedding`."""
    tokens, heads, dim = query.shape
    query_strides, cos_strides, sin_strides = query.stride(), cos.stride(), sin.stride()
    key_strides = query_strides if key is None else key.stride()
    if query_strides[2] != 1 or key_strides[2] != 1 or cos_strides[1] != 1 or sin_strides[1] != 1:
        raise NotSupported("the elements of a head or of a table row do not lie side by side")
    query_out, key_out = query, key
    if not inplace:
        query_out = query.new_empty(query.shape)
        key_out = None if key is None else key.new_empty(key.shape)
    if tokens == 0:
        return query_out, key_out
    half = cos.shape[1]
    block_half = power_of_two(half)
    other, other_out = (query, query_out) if key is None or key_out is None else (key, key_out)
    kv_heads = 0 if key is None else other.shape[1]
    block_heads = min(power_of_two(heads), max(1, TILE // block_half))
    blocks = -(-heads // block_heads) - (-kv_heads // block_heads)
    _launch(
        (tokens * blocks, 1, 1),
        (query, other, cos, sin, position_ids, query_out, other_out),
        (
            *query_strides[:2],
            *key_strides[:2],
            *(query_strides if inplace else query_out.stride())[:2],
            *(key_strides if inplace else other_out.stride())[:2],
            cos_strides[0],
            sin_strides[0],
            position_ids.stride(0),
            heads,
            kv_heads,
            dim,
            half,
            rotary_interleaved,
            not inplace,
            block_heads,
            block_half,
            power_of_two(max(1, dim - 2 * half)),
        ),
    )
    return query_out, key_out
