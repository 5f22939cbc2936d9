"""Decode for latent attention, directly on the latent cache; prefill is in :mod:`.latent_prefill`.

All heads share the latent rows, so a program takes rows of several heads and tokens, and loads each latent row once as
both key and value. Several programs split a request's keys, as in :mod:`.paged`. On Hopper :mod:`..hopper` has a
separate kernel for many rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported

from .. import hopper
from ..launch import power_of_two
from .latent_prefill import check_arguments, mla_prefill
from .online_softmax import LOG2E, store_part, update
from .paged import _slots, _splits, combining_warps
from .paged_kernels import _combine
from .paged_tiles import _share

__all__ = ["mla_decode", "mla_prefill"]

DECODE_TILE = (16, 32, 4, 3)
"""Rows (heads times tokens), keys, warps, stages, for few rows."""
DECODE_TILE_LARGE = (64, 64, 8, 2)
"""``DECODE_TILE`` for many rows."""
DECODE_TILE_WIDE = (16, 16, 4, 2)
"""``DECODE_TILE`` for float32."""
MANY_ROWS = 64
"""Fewest rows of a request that use the large tile."""
LEAST_KEYS = 128
"""Fewest keys of a program when a request's keys are split."""
MOST_SPLITS = 64


@triton.jit(do_not_specialize=["splits", "TABLE_ROW"])
def _decode(
    query,
    query_rope,
    cache,
    block_table,
    query_starts,
    lengths,
    out,
    partial,
    statistics,
    splits,
    QUERY_TOKEN,
    QUERY_HEAD,
    ROPE_TOKEN,
    ROPE_HEAD,
    CACHE_BLOCK,
    CACHE_SLOT,
    OUT_TOKEN,
    OUT_HEAD,
    TABLE_ROW,
    SCALE,
    HEADS: tl.constexpr,
    CACHE_SCALE,
    QUANTIZED: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    MOST_NEW: tl.constexpr,
    DIVIDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: tiles of ``BLOCK_M`` rows, requests, splits. Row ``token * HEADS + head`` of a request.

    ``SCALE`` contains the cache's scale already; ``CACHE_SCALE`` is that scale again, for the values.
    """
    request = tl.program_id(1)
    split = tl.program_id(2)
    begin = tl.load(query_starts + request)
    new = tl.load(query_starts + request + 1) - begin
    first = tl.program_id(0) * BLOCK_M
    if first < new * HEADS:
        row = first + tl.arange(0, BLOCK_M)
        token = row // HEADS
        head = (row % HEADS).to(tl.int64)
        valid = token < new
        length = tl.load(lengths + request)
        place = length - new + token
        start, stop = 0, length
        if DIVIDED:
            share = _share(0, length, splits, BLOCK_N)
            start = split * share
            stop = tl.minimum(start + share, length)
        if CAUSAL:
            last = tl.minimum((first + BLOCK_M - 1) // HEADS, new - 1)
            stop = tl.minimum(stop, length - new + last + 1)
        column = tl.arange(0, BLOCK_N)
        rank = tl.arange(0, BLOCK_RANK)
        rope = tl.arange(0, BLOCK_ROPE)
        source = query + ((begin + token).to(tl.int64) * QUERY_TOKEN + head * QUERY_HEAD)[:, None]
        q = tl.load(source + rank[None, :], mask=valid[:, None] & (rank < RANK)[None, :], other=0.0)
        if ROPE > 0:
            source = query_rope + ((begin + token).to(tl.int64) * ROPE_TOKEN + head * ROPE_HEAD)[:, None]
            q_rope = tl.load(source + rope[None, :], mask=valid[:, None] & (rope < ROPE)[None, :], other=0.0)
        table = block_table + request.to(tl.int64) * TABLE_ROW
        acc = tl.zeros([BLOCK_M, BLOCK_RANK], dtype=tl.float32)
        m_i = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
        l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
        ahead = tl.load(table + (start + column) // BLOCK_SIZE, mask=start + column < stop, other=0)
        for tile in tl.range(start, stop, BLOCK_N):
            position = tile + column
            inside = position < stop
            page = ahead.to(tl.int64)
            ahead = tl.load(table + (position + BLOCK_N) // BLOCK_SIZE, mask=position + BLOCK_N < stop, other=0)
            slot = (position % BLOCK_SIZE).to(tl.int64)
            latent = cache + (page * CACHE_BLOCK + slot * CACHE_SLOT)[:, None]
            kv = tl.load(latent + rank[None, :], mask=inside[:, None] & (rank < RANK)[None, :], other=0.0).to(q.dtype)
            qk = tl.dot(q, tl.trans(kv), input_precision=PRECISION)
            if ROPE > 0:
                k_rope = tl.load(
                    latent + RANK + rope[None, :], mask=inside[:, None] & (rope < ROPE)[None, :], other=0.0
                ).to(q.dtype)
                qk = tl.dot(q_rope, tl.trans(k_rope), qk, input_precision=PRECISION)
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (position[None, :] <= place[:, None])
            p, m_i, l_i, alpha = update(qk, m_i, l_i, SCALE * LOG2E, seen, True)
            acc = tl.dot(p.to(q.dtype), kv, acc * alpha[:, None], input_precision=PRECISION)
        if QUANTIZED:
            acc *= CACHE_SCALE
        inside = valid[:, None] & (rank < RANK)[None, :]
        if not DIVIDED:
            target = (begin + token).to(tl.int64) * OUT_TOKEN + head * OUT_HEAD
            result = acc / l_i[:, None]
            tl.store(out + target[:, None] + rank[None, :], result.to(out.dtype.element_ty), mask=inside)
        elif start < length:  # a share that the causal mask hides adds nothing, but is read
            index = ((request * MOST_NEW + token).to(tl.int64) * HEADS + head) * splits + split
            store_part(partial, statistics, index, rank, acc, m_i, l_i, valid, inside, RANK)


_launch_decode = Launcher(_decode)
_launch_combine = Launcher(_combine)


def mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    kv_lora_rank: int,
    out: Tensor | None = None,
    causal: bool = True,
    cache_scale: float | None = None,
    query_rope: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.mla.mla_decode`. Declines float64, and rows with strided elements."""
    if query_rope is None:
        query, query_rope = query[..., :kv_lora_rank], query[..., kv_lora_rank:]
    if query_rope.dtype is not query.dtype or query.shape[2] != kv_lora_rank:
        raise NotSupported("the parts of the query do not fit each other")
    check_arguments((query, query_rope, kv_cache), out, scale)
    tokens, heads, rope = query_rope.shape
    if out is None:
        out = query.new_empty((tokens, heads, kv_lora_rank))
    requests = seq_lens.shape[0]
    if not requests or not tokens or not max_query_len:
        return out
    wide = query.dtype is torch.float32
    rows = max_query_len * heads
    tile = DECODE_TILE_WIDE if wide else DECODE_TILE if rows < MANY_ROWS else DECODE_TILE_LARGE
    block_m, block_n, warps, stages = tile
    slots = _slots(query.device)
    special = rows >= MANY_ROWS and hopper.fits_latent(query, query_rope, kv_cache)
    if special:
        block_m, block_n, slots = hopper.LATENT_ROWS, hopper.LATENT_KEYS, hopper.latent_slots(query.device)
    tiles = -(-rows // block_m)
    most = min(MOST_SPLITS, -(-max_seq_len // LEAST_KEYS))
    splits = _splits(slots, requests * tiles, most)
    most_new = power_of_two(max_query_len)
    parts = requests * most_new * heads * splits if splits > 1 else 0
    partial = query.new_empty(parts * (kv_lora_rank + 2), dtype=torch.float32) if parts else out
    statistics = partial[parts * kv_lora_rank :] if parts else out
    tensors = (query, query_rope, kv_cache, block_table, query_start_loc, seq_lens, out, partial, statistics)
    numbers = (
        query.stride(0), query.stride(1), query_rope.stride(0), query_rope.stride(1), kv_cache.stride(0),
        kv_cache.stride(1), out.stride(0), out.stride(1), block_table.stride(0),
        scale if cache_scale is None else scale * cache_scale, heads,
    )  # fmt: skip
    if special:
        hopper.decode_latent(
            tensors, numbers, tiles=tiles, requests=requests, splits=splits, block_size=kv_cache.shape[1],
            causal=causal, most_new=most_new,
        )  # fmt: skip
    else:
        _launch_decode(
            (tiles, requests, splits),
            tensors,
            (
                *numbers, 1.0 if cache_scale is None else cache_scale, cache_scale is not None, kv_lora_rank, rope,
                kv_cache.shape[1], causal, most_new, splits > 1, block_m, block_n, max(16, power_of_two(kv_lora_rank)),
                max(16, power_of_two(rope)), "ieee" if wide else "tf32",
            ),
            sizes=(splits,),
            warps=warps,
            stages=stages,
        )  # fmt: skip
    if splits > 1:
        block_rank = max(16, power_of_two(kv_lora_rank))
        _launch_combine(
            (heads, requests, max_query_len),
            (query_start_loc, seq_lens, out, out, partial, statistics),
            (
                out.stride(0), out.stride(1), heads, kv_lora_rank, False, 0, False, power_of_two(most), block_n,
                block_rank,
            ),
            sizes=(splits, most_new),
            warps=combining_warps(power_of_two(most), block_rank),
        )  # fmt: skip
    return out
