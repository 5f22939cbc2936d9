"""The lightning indexer: score cached tokens, then select the best tokens of each query.

One kernel writes the scores of some queries, ``[queries, tokens]``, with a program for each tile of tokens and a few
queries. A second kernel selects: a program finds the ``topk``-th largest score in its share of a query's scores by
their bits, a digit at a time. If a query has several shares, a last program selects from their best scores. Positions
come out in order, so of equal scores the lower position always comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported

from .. import hopper
from ..launch import compiles, power_of_two
from .index_cache import quantized_queries
from .requests import request_of, steps

MOST_SCORES = 1 << 26
"""Most scores in memory at a time: 256 MiB."""
SCORING = (128, 64, 4, 4)
"""Tokens of a tile of scores, queries that share a tile so that its keys are loaded once, warps, stages."""
SCORING_DECODE = (256, 1, 4, 1)
"""``SCORING`` for requests of one query."""
SCORING_WIDE = (32, 32, 4, 2)
"""``SCORING`` for float32."""
SCORING_HOPPER = (3, 2, 64, 8)
"""Groups of warps, tiles of 64 tokens of each, queries and stages of the kernel for Hopper."""
MANY_QUERIES = 32
"""Fewest queries of a request for which that kernel is taken."""
SELECTING = (32768, 2048, 11, 8)
"""Scores that a program selects from, scores that it reads at a time, bits of a digit, warps."""
SELECTING_DECODE = (16384, 4096, 8, 16)
"""``SELECTING`` for requests of one query."""


@triton.jit(do_not_specialize=["first_row", "rows", "width", "TABLE_ROW"])
def _score(
    query,
    weights,
    cache,
    scales,
    block_table,
    query_starts,
    lengths,
    scores,
    first_row,
    rows,
    width,
    TABLE_ROW,
    QUERY_TOKEN,
    QUERY_HEAD,
    WEIGHT_TOKEN,
    WEIGHT_HEAD,
    CACHE_BLOCK,
    CACHE_SLOT,
    SCALE_BLOCK,
    SCALE_SLOT,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: tiles of ``BLOCK_N`` tokens, tiles of ``BLOCK_M`` queries, requests.

    Rows of ``scores`` are the queries from ``first_row`` on. ``SCALED``: each key has a scale.
    """
    request = tl.program_id(2)
    begin = tl.load(query_starts + request)
    new = tl.load(query_starts + request + 1) - begin
    length = tl.load(lengths + request)
    first = tl.maximum(first_row - begin, 0) + tl.program_id(1) * BLOCK_M
    last = tl.minimum(tl.minimum(first + BLOCK_M, new), first_row + rows - begin)
    start = tl.program_id(0) * BLOCK_N
    if (first < last) & (start < length - new + last):
        position = start + tl.arange(0, BLOCK_N)
        seen = position < length
        head = tl.arange(0, BLOCK_H)
        dim = tl.arange(0, BLOCK_D)
        page = tl.load(block_table + request.to(tl.int64) * TABLE_ROW + position // BLOCK_SIZE, mask=seen, other=0)
        page = page.to(tl.int64)
        slot = (position % BLOCK_SIZE).to(tl.int64)
        source = cache + (page * CACHE_BLOCK + slot * CACHE_SLOT)[:, None] + dim[None, :]
        keys = tl.load(source, mask=seen[:, None] & (dim < DIM)[None, :], other=0.0)
        unit = tl.full([BLOCK_N], 1.0, dtype=tl.float32)
        if SCALED:
            unit = tl.load(scales + page * SCALE_BLOCK + slot * SCALE_SLOT, mask=seen, other=0.0)
        for row in tl.range(first, last):
            token = (begin + row).to(tl.int64)
            q = tl.load(
                query + token * QUERY_TOKEN + head[:, None] * QUERY_HEAD + dim[None, :],
                mask=(head < HEADS)[:, None] & (dim < DIM)[None, :],
                other=0.0,
            )
            w = tl.load(weights + token * WEIGHT_TOKEN + head * WEIGHT_HEAD, mask=head < HEADS, other=0.0)
            products = tl.dot(keys, tl.trans(q), input_precision=PRECISION)
            score = tl.sum(tl.maximum(products, 0.0) * w.to(tl.float32)[None, :], axis=1) * unit
            tl.store(scores + (token - first_row) * width + position, score, mask=position <= length - new + row)


@triton.jit
def _rank(score):
    """Map float32 scores to uint32 in the same order; -0 becomes 0."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _tile(scores, start, stop, limit, BLOCK: tl.constexpr):
    """Return the ranks of a tile of scores, whether each is before ``stop``, and their places; read up to ``limit``."""
    place = start + tl.arange(0, BLOCK)
    return _rank(tl.load(scores + place, mask=place < limit, other=float("-inf"))), place < stop, place


@triton.jit(do_not_specialize=["first_row", "requests", "width", "share", "splits"])
def _select(
    scores,
    positions,
    query_starts,
    lengths,
    out,
    best,
    first_row,
    requests,
    width,
    share,
    splits,
    OUT_TOKEN,
    TOPK: tl.constexpr,
    STEPS: tl.constexpr,
    LISTED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
):
    """Grid: queries from ``first_row`` on, shares of their scores.

    With ``LISTED``, the scores belong to the ``positions`` that an earlier launch selected. With ``PARTS``, a share's
    positions go to ``out`` and their scores to ``best``, both ``[queries, splits, TOPK]``; otherwise positions go to
    rows of ``out``.
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    token = first_row + row
    if token < tl.load(query_starts + requests):
        request = request_of(query_starts, token, requests, STEPS)
        visible = tl.load(lengths + request) - tl.load(query_starts + request + 1) + token + 1
        source = scores + row.to(tl.int64) * width
        start = split * share
        stop = tl.minimum(start + share, width if LISTED else visible)
        count = stop - start
        if LISTED:
            # A query with few tokens has fewer of them than its shares have places.
            count = visible
        target = out + token.to(tl.int64) * OUT_TOKEN
        if PARTS:
            target = out + (row.to(tl.int64) * splits + split) * TOPK
            target_best = best + (row.to(tl.int64) * splits + split) * TOPK
        listed = positions + row.to(tl.int64) * width
        if count <= TOPK:
            # Select all. If scores are listed, they are all in the first share, and in order.
            column = tl.arange(0, BLOCK_K)
            exists = column < count
            tl.store(target + column, tl.where(exists, start + column, -1), mask=column < TOPK)
            if PARTS:
                score = tl.load(source + start + column, mask=exists, other=float("-inf"))
                tl.store(target_best + column, score, mask=column < TOPK)
        else:
            BINS: tl.constexpr = 1 << BITS
            # Rows that begin at a multiple of 16 are read up to one, so that a thread loads several scores at once.
            UNIT: tl.constexpr = 1 if LISTED and TOPK % 16 else 16
            source = scores + tl.multiple_of(row.to(tl.int64) * width, UNIT)
            start = tl.multiple_of(start, UNIT)
            limit = tl.multiple_of((stop + UNIT - 1) // UNIT * UNIT, UNIT)
            prefix = tl.full([], 0, dtype=tl.uint32)  # known bits of the topk-th score
            known = tl.full([], 32, dtype=tl.int32)  # right shift that leaves these bits of a rank
            size = stop - start  # scores with these bits
            need = tl.full([], TOPK, dtype=tl.int32)  # how many of them are among the best
            digits = tl.arange(0, BINS)
            for left in tl.static_range(32, 0, -BITS):  # bits that are not known yet
                if size > need:
                    shift = left - BITS if left > BITS else 0
                    counts = tl.zeros([BINS], dtype=tl.int32)
                    others = -size
                    for tile in tl.range(start, stop, BLOCK):
                        rank, inside, _ = _tile(source, tile, stop, limit, BLOCK)
                        if left < 32:
                            inside = inside & ((rank >> left) == prefix)
                        digit = ((rank >> shift) & ((1 << (left - shift)) - 1)).to(tl.int32)
                        counts += tl.histogram(tl.where(inside, digit, 0), BINS)
                        others += BLOCK
                    counts = tl.where(digits == 0, counts - others, counts)
                    above = size - tl.cumsum(counts, axis=0)
                    chosen = tl.sum((above >= need).to(tl.int32), axis=0)
                    need -= tl.sum(tl.where(digits == chosen, above, 0), axis=0)
                    size = tl.sum(tl.where(digits == chosen, counts, 0), axis=0)
                    prefix = (prefix << (left - shift)) | chosen.to(tl.uint32)
                    known = shift
            better = 0
            equal = 0
            for tile in tl.range(start, stop, BLOCK):
                rank, inside, place = _tile(source, tile, stop, limit, BLOCK)
                bits = rank >> known.to(tl.uint32)
                more = (inside & (bits > prefix)).to(tl.int32)
                same = (inside & (bits == prefix)).to(tl.int32)
                both = more | (same << 16)  # one sum counts both
                before = tl.cumsum(both, axis=0) - both
                ties = equal + (before >> 16)
                take = (more > 0) | ((same > 0) & (ties < need))
                index = better + (before & 0xFFFF) + tl.minimum(ties, need)
                found = place
                if LISTED:
                    found = tl.load(listed + place, mask=take, other=0)
                tl.store(target + index, found, mask=take)
                if PARTS:
                    tl.store(target_best + index, tl.load(source + place, mask=take, other=0.0), mask=take)
                counted = tl.sum(both, axis=0)
                better += counted & 0xFFFF
                equal += counted >> 16


_launch_score = Launcher(_score)
_launch_select = Launcher(_select)


def supports(key_cache: Tensor) -> bool | str:
    """Whether kernels with the cache's dtype compile for the device."""
    return compiles(key_cache.dtype, key_cache.device)


def index_topk(
    query: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    topk: int,
    out: Tensor | None = None,
    key_scales: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.sparse_mla.index_topk`.

    Declines float64, rows with strided elements, and keys with several scales.
    """
    if query.dtype is torch.float64:
        raise NotSupported("float64")
    if key_scales is not None and key_scales.shape[2] > 1:
        raise NotSupported(f"keys of {query.shape[2]} elements have {key_scales.shape[2]} scales")
    if any(tensor.stride(-1) != 1 for tensor in (query, key_cache)) or (out is not None and out.stride(1) != 1):
        raise NotSupported("the elements of a row do not lie side by side")
    tokens, heads, dim = query.shape
    if out is None:
        out = query.new_empty((tokens, topk), dtype=torch.int32)
    requests = seq_lens.shape[0]
    if not requests or not tokens or not max_query_len or not max_seq_len:
        return out
    scales, scale_strides = out, (0, 0)
    if key_scales is not None:
        query, weights = quantized_queries(query, weights)
        scales, scale_strides = key_scales, (key_scales.stride(0), key_scales.stride(1))
    wide = query.dtype is torch.float32
    decoding = max_query_len == 1
    keys, queries, warps, stages = SCORING_WIDE if wide else SCORING_DECODE if decoding else SCORING
    width = -(-max_seq_len // keys) * keys
    most = max(1, MOST_SCORES // width)
    strides: tuple[int, ...] = (
        query.stride(0), query.stride(1), *weights.stride(), key_cache.stride(0), key_cache.stride(1), *scale_strides
    )  # fmt: skip
    numbers = (
        *strides, heads, dim, key_scales is not None, key_cache.shape[1], max(16, power_of_two(heads)),
        max(32, power_of_two(dim)), keys, queries, "ieee" if wide else "tf32",
    )  # fmt: skip
    tensors = (query, weights, key_cache, scales, block_table, query_start_loc, seq_lens)
    special = key_scales is not None and max_query_len >= MANY_QUERIES and hopper.fits_scores(query, key_cache)
    if special:
        groups, tiles, queries, _ = SCORING_HOPPER
        keys = hopper.SCORE_ROWS * groups * tiles
    for first in range(0, tokens, most):
        rows = min(most, tokens - first)
        scores = weights.new_empty((rows, width), dtype=torch.float32)
        grid = (-(-width // keys), -(-min(rows, max_query_len) // queries), requests)
        sizes = (first, rows, width, block_table.stride(0))
        if special:
            hopper.score(
                (*tensors, scores), (*strides[:3], *strides[4:]), sizes=sizes, grid=grid,
                block_size=key_cache.shape[1], constants=SCORING_HOPPER,
            )  # fmt: skip
        else:
            _launch_score(grid, (*tensors, scores), numbers, sizes=sizes, warps=warps, stages=stages)
        _best(scores, query_start_loc, seq_lens, out, first, topk, SELECTING_DECODE if decoding else SELECTING)
    return out


def _best(
    scores: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    first: int,
    topk: int,
    selecting: tuple[int, int, int, int],
) -> None:
    """Write the positions of the best scores into rows of ``out``, for queries from ``first`` on."""
    rows, width = scores.shape
    requests = seq_lens.shape[0]
    share, tile, bits, warps = selecting
    share = max(share, power_of_two(2 * topk))
    splits = -(-width // share)
    constants = (topk, steps(requests))
    block_k = power_of_two(topk)
    if splits == 1:
        _launch_select(
            (rows, 1, 1), (scores, out, query_start_loc, seq_lens, out, scores),
            (out.stride(0), *constants, False, False, tile, block_k, bits),
            sizes=(first, requests, width, width, 1), warps=warps,
        )  # fmt: skip
        return
    parts = scores.new_empty((rows, splits * topk), dtype=torch.int32)
    best = scores.new_empty((rows, splits * topk))
    _launch_select(
        (rows, splits, 1), (scores, out, query_start_loc, seq_lens, parts, best),
        (0, *constants, False, True, tile, block_k, bits),
        sizes=(first, requests, width, share, splits), warps=warps,
    )  # fmt: skip
    _launch_select(
        (rows, 1, 1), (best, parts, query_start_loc, seq_lens, out, best),
        (out.stride(0), *constants, True, False, tile, block_k, bits),
        sizes=(first, requests, splits * topk, splits * topk, 1), warps=warps,
    )  # fmt: skip
