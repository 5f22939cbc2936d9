"""Rotate queries and keys, and write keys and values into the paged cache, in one launch.

A program takes some query heads or some key-value heads of a token. The arithmetic is the same as in the two separate
kernels, so results are equal bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.quantization import LARGEST

from ..attention import cache
from ..launch import power_of_two
from ..rows import rotary

LEAST = 16
"""Fewest key-value heads of a tile, masked if missing: with fewer a thread has less than 16 bytes of a head."""


@triton.jit(do_not_specialize=["written"])
def _rotate_and_write(
    query,
    key,
    value,
    cos,
    sin,
    positions,
    slots,
    query_out,
    key_out,
    key_cache,
    value_cache,
    written,
    QUERY_TOKEN,
    QUERY_HEAD,
    KEY_TOKEN,
    KEY_HEAD,
    VALUE_TOKEN,
    VALUE_HEAD,
    VALUE_DIM,
    KEY_BLOCK,
    KEY_SLOT,
    KEY_CACHE_HEAD,
    KEY_CACHE_DIM,
    VALUE_BLOCK,
    VALUE_SLOT,
    VALUE_CACHE_HEAD,
    VALUE_CACHE_DIM,
    COS_ROW,
    SIN_ROW,
    POSITION_STRIDE,
    SLOT_STRIDE,
    KEY_SCALE,
    VALUE_SCALE,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """``written``: tokens that have a slot. ``LARGEST``: the largest number of a quantized cache's type, else 0."""
    query_parts: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    parts: tl.constexpr = query_parts + (KV_HEADS + BLOCK_KV_HEADS - 1) // BLOCK_KV_HEADS
    token = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    position = positions + token * POSITION_STRIDE
    if part < query_parts:
        rotary.rotate(
            query + token * QUERY_TOKEN, query_out + token * HEADS * DIM, cos, sin, position,
            part * BLOCK_HEADS, COS_ROW, SIN_ROW,
            QUERY_HEAD, DIM, HEADS, DIM, HALF, INTERLEAVED, True, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        head = (part - query_parts) * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS)[:, None]
        here = head < KV_HEADS
        column_v = tl.arange(0, BLOCK_DIM_V)[None, :]
        # All loads start before position and slot have arrived.
        new_v = tl.load(
            value + token * VALUE_TOKEN + head * VALUE_HEAD + column_v * VALUE_DIM, mask=here & (column_v < DIM_V)
        )  # fmt: skip
        slot = tl.load(slots + token * SLOT_STRIDE, mask=token < written, other=-1).to(tl.int64)
        read = key + token * KEY_TOKEN + head * KEY_HEAD
        x, y = rotary.turned(
            read, cos, sin, position, head, COS_ROW, SIN_ROW, KV_HEADS, HALF, INTERLEAVED, BLOCK_KV_HEADS, BLOCK_HALF
        )  # fmt: skip
        kind = key.dtype.element_ty
        x, y = x.to(kind), y.to(kind)
        out = key_out + token * KV_HEADS * DIM + head * DIM
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        target = key_cache + block * KEY_BLOCK + place * KEY_SLOT + head * KEY_CACHE_HEAD
        target_v = value_cache + block * VALUE_BLOCK + place * VALUE_SLOT + head * VALUE_CACHE_HEAD
        there = here & (slot + tl.zeros([1, 1], tl.int64) >= 0)  # the interpreter takes no scalar as a mask
        rotary.put(out, 1, x, y, here, HALF, INTERLEAVED, BLOCK_KV_HEADS, BLOCK_HALF)
        stored: tl.constexpr = key_cache.dtype.element_ty
        kept_x, kept_y = cache.stored(x, KEY_SCALE, LARGEST, stored), cache.stored(y, KEY_SCALE, LARGEST, stored)
        rotary.put(
            target, KEY_CACHE_DIM, kept_x, kept_y, there, HALF, INTERLEAVED, BLOCK_KV_HEADS, BLOCK_HALF
        )  # fmt: skip
        if DIM > 2 * HALF:
            column = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            rest = tl.load(read + column, mask=here & (column < DIM))
            tl.store(out + column, rest, mask=here & (column < DIM))
            kept = cache.stored(rest, KEY_SCALE, LARGEST, stored)
            tl.store(target + column * KEY_CACHE_DIM, kept, mask=there & (column < DIM))
        kept_v = cache.stored(new_v, VALUE_SCALE, LARGEST, value_cache.dtype.element_ty)
        tl.store(target_v + column_v * VALUE_CACHE_DIM, kept_v, mask=there & (column_v < DIM_V))


_launch = Launcher(_rotate_and_write)


def rotary_embedding_kv_cache_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    rotary_interleaved: bool = False,
    key_scale: float | None = None,
    value_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.fused.rotary_embedding_kv_cache_write`."""
    tokens, heads, dim = query.shape
    _, kv_heads, dim_v = value.shape
    query_strides, key_strides, cos_strides, sin_strides = query.stride(), key.stride(), cos.stride(), sin.stride()
    if query_strides[2] != 1 or key_strides[2] != 1 or cos_strides[1] != 1 or sin_strides[1] != 1:
        raise NotSupported("the elements of a head or of a table row do not lie side by side")
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    if tokens == 0:
        return query_out, key_out
    half = cos.shape[1]
    block_half = power_of_two(half)
    most = max(1, rotary.TILE // block_half)
    block_heads, block_kv_heads = min(power_of_two(heads), most), min(max(power_of_two(kv_heads), LEAST), most)
    parts = -(-heads // block_heads) - (-kv_heads // block_kv_heads)
    _launch(
        (tokens * parts, 1, 1),
        (
            query, key, value, cos, sin, position_ids, slot_mapping, query_out, key_out, key_cache, value_cache,
        ),
        (
            *query_strides[:2],
            *key_strides[:2],
            *value.stride(),
            *key_cache.stride(),
            *value_cache.stride(),
            cos_strides[0],
            sin_strides[0],
            position_ids.stride(0),
            slot_mapping.stride(0),
            1.0 if key_scale is None else key_scale,
            1.0 if value_scale is None else value_scale,
            heads,
            kv_heads,
            dim,
            dim_v,
            half,
            rotary_interleaved,
            key_cache.shape[1],
            block_heads,
            block_kv_heads,
            block_half,
            power_of_two(max(1, dim - 2 * half)),
            power_of_two(dim_v),
            0.0 if key_scale is None else LARGEST["float8_e4m3fn"],
        ),
        sizes=(slot_mapping.shape[0],),
    )  # fmt: skip
    return query_out, key_out
