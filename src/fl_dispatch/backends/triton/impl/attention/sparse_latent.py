"""Latent attention over the cached tokens that a query lists (its top-k indices).

A program takes some heads of one query and a share of its indices, and loads each listed latent row once, as both key
and value.
A second kernel combines the shares. On Hopper :mod:`..hopper` has a separate kernel for many heads of many queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher

from .. import hopper
from ..launch import power_of_two
from .latent_prefill import check_arguments
from .online_softmax import LOG2E, store_part, update
from .paged import _slots, _splits, combining_warps
from .requests import request_of, steps

TILE = (16, 32, 4, 3)
"""Heads, listed rows, warps, stages, for few heads."""
TILE_LARGE = (64, 64, 8, 2)
"""``TILE`` for many heads."""
TILE_FEW = (16, 64, 4, 3)
"""``TILE`` for many heads of few queries: large tiles would leave most of the chip idle."""
TILE_WIDE = (16, 16, 4, 2)
"""``TILE`` for float32."""
MANY_HEADS = 64
"""Fewest heads that use the large tile."""
FEW_ROWS = 128
"""Most rows (heads times queries) with ``TILE_FEW``."""
LEAST_ROWS = 128
"""Fewest indices of a program if several programs share those of a query."""
MOST_SPLITS = 32


@triton.jit(do_not_specialize=["requests", "splits", "TABLE_ROW"])
def _attend(
    query,
    query_rope,
    cache,
    positions,
    block_table,
    query_starts,
    out,
    partial,
    statistics,
    requests,
    splits,
    TABLE_ROW,
    QUERY_TOKEN,
    QUERY_HEAD,
    ROPE_TOKEN,
    ROPE_HEAD,
    CACHE_BLOCK,
    CACHE_SLOT,
    LIST_TOKEN,
    OUT_TOKEN,
    OUT_HEAD,
    SCALE,
    CACHE_SCALE,
    QUANTIZED: tl.constexpr,
    HEADS: tl.constexpr,
    LISTED: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    DIVIDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: queries, tiles of ``BLOCK_M`` heads, splits. ``SCALE`` contains the cache's scale already."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    if token < tl.load(query_starts + requests):
        request = request_of(query_starts, token, requests, STEPS)
        head = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        valid = head < HEADS
        start, stop = 0, LISTED
        if DIVIDED:
            share = tl.cdiv(tl.cdiv(LISTED, splits), BLOCK_N) * BLOCK_N
            start = split * share
            stop = tl.minimum(start + share, LISTED)
        column = tl.arange(0, BLOCK_N)
        rank = tl.arange(0, BLOCK_RANK)
        rope = tl.arange(0, BLOCK_ROPE)
        source = query + token * QUERY_TOKEN + (head * QUERY_HEAD)[:, None]
        q = tl.load(source + rank[None, :], mask=valid[:, None] & (rank < RANK)[None, :], other=0.0)
        if ROPE > 0:
            source = query_rope + token * ROPE_TOKEN + (head * ROPE_HEAD)[:, None]
            q_rope = tl.load(source + rope[None, :], mask=valid[:, None] & (rope < ROPE)[None, :], other=0.0)
        table = block_table + request.to(tl.int64) * TABLE_ROW
        listed = positions + token * LIST_TOKEN
        acc = tl.zeros([BLOCK_M, BLOCK_RANK], dtype=tl.float32)
        m_i = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
        l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
        for tile in tl.range(start, stop, BLOCK_N):
            position = tl.load(listed + tile + column, mask=tile + column < stop, other=-1)
            inside = position >= 0
            page = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = (position % BLOCK_SIZE).to(tl.int64)
            latent = cache + (page * CACHE_BLOCK + slot * CACHE_SLOT)[:, None]
            kv = tl.load(latent + rank[None, :], mask=inside[:, None] & (rank < RANK)[None, :], other=0.0).to(q.dtype)
            qk = tl.dot(q, tl.trans(kv), input_precision=PRECISION)
            if ROPE > 0:
                k_rope = tl.load(
                    latent + RANK + rope[None, :], mask=inside[:, None] & (rope < ROPE)[None, :], other=0.0
                ).to(q.dtype)
                qk = tl.dot(q_rope, tl.trans(k_rope), qk, input_precision=PRECISION)
            p, m_i, l_i, alpha = update(qk, m_i, l_i, SCALE * LOG2E, inside[None, :], True, EMPTY_ROWS=True)
            acc = tl.dot(p.to(q.dtype), kv, acc * alpha[:, None], input_precision=PRECISION)
        if QUANTIZED:
            acc *= CACHE_SCALE
        inside = valid[:, None] & (rank < RANK)[None, :]
        if DIVIDED:
            index = (token * HEADS + head) * splits + split
            store_part(partial, statistics, index, rank, acc, m_i, l_i, valid, inside, RANK)
        else:
            result = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
            target = out + token * OUT_TOKEN + (head * OUT_HEAD)[:, None] + rank[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["requests", "splits"])
def _add_up(
    query_starts,
    out,
    partial,
    statistics,
    requests,
    splits,
    OUT_TOKEN,
    OUT_HEAD,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Add up the shares of one query and head. Grid: heads, queries."""
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    if token < tl.load(query_starts + requests):
        split = tl.arange(0, BLOCK_SPLITS)
        rank = tl.arange(0, BLOCK_RANK)
        index = (token * HEADS + head) * splits + split
        m_parts = tl.load(statistics + index * 2, mask=split < splits, other=-1e30)
        l_parts = tl.load(statistics + index * 2 + 1, mask=split < splits, other=0.0)
        alpha = tl.exp2(m_parts - tl.max(m_parts, axis=0))
        l_i = tl.sum(l_parts * alpha, axis=0)
        inside = (split < splits)[:, None] & (rank < RANK)[None, :]
        parts = tl.load(partial + index[:, None] * RANK + rank[None, :], mask=inside, other=0.0)
        result = tl.sum(parts * alpha[:, None], axis=0) / tl.where(l_i > 0.0, l_i, 1.0)
        target = out + token * OUT_TOKEN + head * OUT_HEAD + rank
        tl.store(target, result.to(out.dtype.element_ty), mask=rank < RANK)


_launch = Launcher(_attend)
_launch_sum = Launcher(_add_up)


def takes_hopper(query: Tensor, query_rope: Tensor, kv_cache: Tensor) -> bool:
    """Return whether the kernel for Hopper takes these tensors: many heads of many queries, in half types."""
    tokens, heads = query.shape[:2]
    return heads >= MANY_HEADS and tokens * heads > FEW_ROWS and hopper.fits_listed(query, query_rope, kv_cache)


def mla_sparse(
    query: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    kv_lora_rank: int,
    out: Tensor | None = None,
    cache_scale: float | None = None,
    query_rope: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.sparse_mla.mla_sparse`. Declines float64, and rows with strided elements."""
    if query_rope is None:
        query, query_rope = query[..., :kv_lora_rank], query[..., kv_lora_rank:]
    check_arguments((query, query_rope, kv_cache, positions), out, scale)
    tokens, heads, rope = query_rope.shape
    listed, requests = positions.shape[1], block_table.shape[0]
    if out is None:
        out = query.new_empty((tokens, heads, kv_lora_rank))
    if not requests or not tokens or not max_query_len:
        return out
    wide = query.dtype is torch.float32
    many = TILE_FEW if tokens * heads <= FEW_ROWS else TILE_LARGE
    special = takes_hopper(query, query_rope, kv_cache)
    block_m, block_n, warps, stages = TILE_WIDE if wide else TILE if heads < MANY_HEADS else many
    slots = _slots(query.device)
    if special:
        block_m, slots = hopper.LATENT_ROWS, hopper.latent_slots(query.device)
    tiles = -(-heads // block_m)
    most = max(1, min(MOST_SPLITS, listed // LEAST_ROWS))
    splits = _splits(slots, tokens * tiles, most)
    parts = tokens * heads * splits if splits > 1 else 0
    partial = query.new_empty(parts * (kv_lora_rank + 2), dtype=torch.float32) if parts else out
    statistics = partial[parts * kv_lora_rank :] if parts else out
    block_rank = max(16, power_of_two(kv_lora_rank))
    sources = query, query_rope, kv_cache, positions
    targets = block_table, query_start_loc, out, partial, statistics
    strides = (
        query.stride(0), query.stride(1), query_rope.stride(0), query_rope.stride(1), kv_cache.stride(0),
        kv_cache.stride(1), positions.stride(0), out.stride(0), out.stride(1),
    )  # fmt: skip
    sizes = requests, splits, block_table.stride(0)
    if special:
        counts = positions.ge(0).sum(-1, dtype=torch.int32)
        hopper.attend_listed(
            (*sources, counts, *targets), (*strides, scale, heads), sizes=sizes, tiles=tiles,
            block_size=kv_cache.shape[1], halvings=steps(requests),
        )  # fmt: skip
    else:
        _launch(
            (tokens, tiles, splits),
            (*sources, *targets),
            (
                *strides, scale if cache_scale is None else scale * cache_scale,
                1.0 if cache_scale is None else cache_scale, cache_scale is not None, heads, listed, kv_lora_rank,
                rope, kv_cache.shape[1], steps(requests), splits > 1, block_m, block_n, block_rank,
                max(16, power_of_two(rope)), "ieee" if wide else "tf32",
            ),
            sizes=sizes,
            warps=warps,
            stages=stages,
        )  # fmt: skip
    if splits > 1:
        block_splits = power_of_two(splits)
        _launch_sum(
            (heads, tokens, 1),
            (query_start_loc, out, partial, statistics),
            (out.stride(0), out.stride(1), heads, kv_lora_rank, block_splits, block_rank),
            sizes=(requests, splits),
            warps=combining_warps(block_splits, block_rank),
        )
    return out
