"""Attention over a paged cache: flash attention (Dao, arXiv 2307.08691) with an online softmax in base 2.

One kernel serves two routes. *Long* requests, such as prompts: a program takes ``BLOCK_M`` queries of one head, runs
over the keys that all of them see without a mask, and over the edges with one. *Short* requests, such as decode: a
program takes the few queries of all heads that share a key-value head, and a request's keys are split among programs,
whose partial results a second kernel adds up. A batch of both kinds takes both routes, each on its own requests.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.errors import NotSupported

from .launch import Launcher, power_of_two

LONG_TILE, LONG_TILE_LARGE = (128, 64, 8, 3), (64, 32, 4, 2)
"""Queries, keys, warps, stages of the long route; the large ones for float32 and for heads over 128."""
SHORT_TILE, SHORT_TILE_LARGE = (64, 2, 3), (32, 4, 2)
"""Keys, warps, stages of the short route."""
SHORT_ROWS = 16
"""Rows (queries times heads of a group) that a program of the short route takes in a batch with long requests."""
MOST_SHORT_ROWS = 64
"""Up to so many rows a whole batch takes the short route."""
SHORT_PER_PROCESSOR = 2
"""Programs of the short route that share a processor."""
FULL = 0.9
"""How full the last wave of programs has to be."""
LEAST_KEYS = 128
"""Keys that are worth a program of their own."""
LEAST_KEYS_MIXED = 2048
"""The same beside long requests; without so many keys all requests take the long route."""
MOST_SPLITS = 64
LONGEST = 1 << 30
LIMIT = 1 << 31


@triton.jit
def _span(length, new, first, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The keys that some query of a program sees: from a multiple of ``BLOCK_N`` up to the end.

    Args: keys of the request, its new tokens, the program's first query among them.
    """
    begin = length - new + first
    last = tl.minimum(begin + TOKENS, length) - 1
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
    """How many keys each of ``splits`` programs takes, a multiple of ``BLOCK_N``."""
    return tl.cdiv(tl.cdiv(high - low, splits), BLOCK_N) * BLOCK_N


@triton.jit
def _page(table, tile, column, first_seen, length, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The cache blocks that hold a tile of keys: one number where one block holds it, else one for each key.

    It is asked for one tile ahead, so that the keys' addresses do not wait for it.
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
    top,
    below,
    q,
    key,
    value,
    table,
    start,
    stop,
    first_seen,
    length,
    place,
    slope,
    SCALE,
    SOFTCAP,
    KEY_BLOCK,
    KEY_SLOT,
    KEY_DIM,
    VALUE_BLOCK,
    VALUE_SLOT,
    VALUE_DIM,
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
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Attend to the keys from ``start``, a multiple of ``BLOCK_N``, up to ``stop``; all of them are seen by all queries
    unless ``MASKED``.
    """
    column = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    dim_v = tl.arange(0, BLOCK_DV)
    ahead = _page(table, start, column, first_seen, length, BLOCK_N, BLOCK_SIZE)
    for tile in tl.range(start, stop, BLOCK_N):
        position = tile + column
        if MASKED:
            inside = (position >= first_seen) & (position < length)
        page = ahead
        ahead = _page(table, tile + BLOCK_N, column, first_seen, length, BLOCK_N, BLOCK_SIZE)
        if not NARROW:
            page = page.to(tl.int64)
        slot = position % BLOCK_SIZE
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
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        factor = 1.4426950408889634  # what takes a score to base 2
        if CAPPED:
            scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 * SCALE / SOFTCAP)) - 1.0)
        elif ALIBI:
            scores = scores * SCALE
        else:
            factor = SCALE * 1.4426950408889634  # goes into the exponent's one multiply-add
        if ALIBI or MASKED:
            distance = place[:, None] - position[None, :]
        if ALIBI:
            scores -= slope[:, None] * tl.abs(distance).to(tl.float32)
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (distance >= 0)
            if WINDOW > 0:
                seen = seen & (tl.abs(distance) < WINDOW)
            # Finite, so that a row which sees nothing yet has no NaN: what it adds is scaled by 0 later. It must not
            # meet the factor: a fused multiply-add of it and of its rounded product would be far from 0.
            scores = tl.where(seen, scores * factor, -1e30)
            factor = 1.0
        new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
        decay = tl.exp2(top - new_top)
        weights = tl.exp2(scores * factor - new_top[:, None])
        below = below * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, below


@triton.jit(do_not_specialize=["splits"])
def _attention(
    query,
    key_cache,
    value_cache,
    block_table,
    query_starts,
    lengths,
    out,
    slopes,
    sinks,
    partial,
    statistics,
    splits,
    QUERY_TOKEN,
    QUERY_HEAD,
    QUERY_DIM,
    KEY_BLOCK,
    KEY_SLOT,
    KEY_HEAD,
    KEY_DIM,
    VALUE_BLOCK,
    VALUE_SLOT,
    VALUE_HEAD,
    VALUE_DIM,
    OUT_TOKEN,
    OUT_HEAD,
    TABLE_ROW,
    SCALE,
    SOFTCAP,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    LEAST_NEW: tl.constexpr,
    MOST_NEW: tl.constexpr,
    SHORT: tl.constexpr,
    PACKED: tl.constexpr,
    DIVIDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Grid: heads (``SHORT``: of the keys, else of the queries), requests, tiles of queries times ``splits``.

    A tile has ``BLOCK_M`` rows, ``PACKED`` for each query: with ``SHORT`` the heads that share a key-value head.
    """
    TOKENS: tl.constexpr = BLOCK_M // PACKED
    request = tl.program_id(1)
    # The last tiles of a prompt see the most keys, so they start first.
    tile = tl.num_programs(2) // splits - 1 - tl.program_id(2) // splits
    split = tl.program_id(2) % splits
    begin = tl.load(query_starts + request)
    new = tl.load(query_starts + request + 1) - begin
    first = tile * TOKENS
    if (new >= LEAST_NEW) & (new <= MOST_NEW) & (first < new):
        row = tl.arange(0, BLOCK_M)
        token = first + row // PACKED
        if SHORT:
            kv_head = tl.program_id(0)
            head = kv_head * GROUP + row % PACKED
            valid = (token < new) & (row % PACKED < GROUP)
        else:
            kv_head = tl.program_id(0) // GROUP
            head = tl.program_id(0) + row * 0
            valid = token < new
        length = tl.load(lengths + request)
        place = length - new + token
        low, high = _span(length, new, first, TOKENS, BLOCK_N, CAUSAL, WINDOW)
        first_seen = 0
        if WINDOW > 0:
            first_seen = tl.maximum(length - new + first - WINDOW + 1, 0)
        start, stop = low, high
        if DIVIDED:
            share = _share(low, high, splits, BLOCK_N)
            start = low + split * share
            stop = tl.minimum(start + share, high)
        if start < stop:
            dim = tl.arange(0, BLOCK_D)
            dim_v = tl.arange(0, BLOCK_DV)
            source = (begin + token).to(tl.int64) * QUERY_TOKEN + head * QUERY_HEAD
            q = tl.load(
                query + source[:, None] + dim[None, :] * QUERY_DIM,
                mask=valid[:, None] & (dim[None, :] < DIM),
                other=0.0,
            )
            key = key_cache + kv_head.to(tl.int64) * KEY_HEAD
            value = value_cache + kv_head.to(tl.int64) * VALUE_HEAD
            table = block_table + request.to(tl.int64) * TABLE_ROW
            acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
            top = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
            below = tl.zeros([BLOCK_M], dtype=tl.float32)
            slope = below
            if ALIBI:
                slope = tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32)
            if SINKS and not DIVIDED:
                top = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
                below += 1.0
            if SHORT:
                acc, top, below = _tiles(
                    acc, top, below, q, key, value, table, start, stop, first_seen, length, place, slope,
                    SCALE, SOFTCAP, KEY_BLOCK, KEY_SLOT, KEY_DIM, VALUE_BLOCK, VALUE_SLOT, VALUE_DIM,
                    DIM, DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_SIZE, CAUSAL, WINDOW,
                    CAPPED, ALIBI, True, PRECISION, NARROW,
                )  # fmt: skip
            else:
                # The tiles that every query of the program sees as a whole.
                before = length - new + first
                last = tl.minimum(before + TOKENS, length) - 1
                whole_stop = stop // BLOCK_N * BLOCK_N
                whole_start = start
                if CAUSAL:
                    whole_stop = (before + 1) // BLOCK_N * BLOCK_N
                if WINDOW > 0:
                    if not CAUSAL:
                        whole_stop = tl.minimum(length, before + WINDOW) // BLOCK_N * BLOCK_N
                    whole_start = tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
                    whole_start = tl.minimum(whole_start, tl.cdiv(stop, BLOCK_N) * BLOCK_N)
                    acc, top, below = _tiles(
                        acc, top, below, q, key, value, table, start, tl.minimum(whole_start, stop), first_seen,
                        length, place, slope, SCALE, SOFTCAP, KEY_BLOCK, KEY_SLOT, KEY_DIM, VALUE_BLOCK, VALUE_SLOT,
                        VALUE_DIM, DIM, DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_SIZE, CAUSAL, WINDOW, CAPPED, ALIBI,
                        True, PRECISION, NARROW,
                    )  # fmt: skip
                whole_stop = tl.maximum(whole_start, whole_stop)
                acc, top, below = _tiles(
                    acc, top, below, q, key, value, table, whole_start, whole_stop, first_seen, length, place, slope,
                    SCALE, SOFTCAP, KEY_BLOCK, KEY_SLOT, KEY_DIM, VALUE_BLOCK, VALUE_SLOT, VALUE_DIM,
                    DIM, DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_SIZE, CAUSAL, WINDOW,
                    CAPPED, ALIBI, False, PRECISION, NARROW,
                )  # fmt: skip
                acc, top, below = _tiles(
                    acc, top, below, q, key, value, table, whole_stop, stop, first_seen, length, place, slope,
                    SCALE, SOFTCAP, KEY_BLOCK, KEY_SLOT, KEY_DIM, VALUE_BLOCK, VALUE_SLOT, VALUE_DIM,
                    DIM, DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_SIZE, CAUSAL, WINDOW,
                    CAPPED, ALIBI, True, PRECISION, NARROW,
                )  # fmt: skip
            inside = valid[:, None] & (dim_v[None, :] < DIM_V)
            if not DIVIDED:
                result = acc / below[:, None]
                target = (begin + token).to(tl.int64) * OUT_TOKEN + head * OUT_HEAD
                tl.store(out + target[:, None] + dim_v[None, :], result.to(out.dtype.element_ty), mask=inside)
            else:
                index = ((request * TOKENS + token).to(tl.int64) * HEADS + head) * splits + split
                tl.store(partial + index[:, None] * DIM_V + dim_v[None, :], acc, mask=inside)
                tl.store(statistics + index * 2, top, mask=valid)
                tl.store(statistics + index * 2 + 1, below, mask=valid)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    query_starts,
    lengths,
    out,
    sinks,
    partial,
    statistics,
    splits,
    OUT_TOKEN,
    OUT_HEAD,
    HEADS: tl.constexpr,
    DIM_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    MOST_NEW: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Add up the partial results of one query and head. Grid: heads, requests, queries."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    token = tl.program_id(2)
    begin = tl.load(query_starts + request)
    new = tl.load(query_starts + request + 1) - begin
    if (token < new) & (new <= MOST_NEW):
        low, high = _span(tl.load(lengths + request), new, 0, TOKENS, BLOCK_N, CAUSAL, WINDOW)
        share = _share(low, high, splits, BLOCK_N)
        split = tl.arange(0, BLOCK_SPLITS)
        used = (split < splits) & (low + split * share < high)
        dim = tl.arange(0, BLOCK_DV)
        index = ((request * TOKENS + token).to(tl.int64) * HEADS + head) * splits + split
        tops = tl.load(statistics + index * 2, mask=used, other=-1e30)
        belows = tl.load(statistics + index * 2 + 1, mask=used, other=0.0)
        top = tl.max(tops, axis=0)
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(top, sink)
        factors = tl.exp2(tops - top)
        below = tl.sum(belows * factors, axis=0)
        if SINKS:
            below += tl.exp2(sink - top)
        parts = tl.load(
            partial + index[:, None] * DIM_V + dim[None, :], mask=used[:, None] & (dim[None, :] < DIM_V), other=0.0
        )
        result = tl.sum(parts * factors[:, None], axis=0) / below
        target = out + (begin + token).to(tl.int64) * OUT_TOKEN + head * OUT_HEAD
        tl.store(target + dim, result.to(out.dtype.element_ty), mask=dim < DIM_V)


_launch = Launcher(_attention)
_launch_combine = Launcher(_combine)


@functools.cache
def _slots(device: torch.device) -> int:
    """How many programs of the short route the device runs at a time."""
    processors = 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
    return SHORT_PER_PROCESSOR * processors


@functools.cache
def _splits(slots: int, programs: int, most: int) -> int:
    """Among how many programs the keys of each request are divided: few, but so that the last wave is nearly full."""
    fill = [0.0] + [programs * splits / slots / -(-programs * splits // slots) for splits in range(1, most + 1)]
    return next((splits for splits in range(1, most + 1) if fill[splits] >= FULL), fill.index(max(fill)))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    out: Tensor | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.attention.paged_attention`. Declines float64, and an ``out`` with strided elements."""
    tokens, heads, dim = query.shape
    blocks, block_size, kv_heads, dim_v = value_cache.shape
    if query.dtype is torch.float64 or scale <= 0:
        raise NotSupported("float64" if scale > 0 else f"the scale {scale}")
    if out is None:
        out = query.new_empty((tokens, heads, dim_v))
    elif out.stride(2) != 1:
        raise NotSupported("the elements of a head of 'out' do not lie side by side")
    requests = seq_lens.shape[0]
    if not requests or not tokens or not max_query_len:
        return out
    key_strides, value_strides = key_cache.stride(), value_cache.stride()
    narrow = blocks * max(key_strides[0], value_strides[0]) < LIMIT
    group = heads // kv_heads
    packed = power_of_two(group)
    block_d, block_dv = max(16, power_of_two(dim)), max(16, power_of_two(dim_v))
    wide = query.dtype is torch.float32
    large = wide or block_d > 128
    tail = (block_d, block_dv, "ieee" if wide else "tf32", narrow)  # half types take no notice of tf32
    window = sliding_window or 0
    common = (heads, group, dim, dim_v, block_size, causal, window, softcap > 0, alibi_slopes is not None)
    numbers = (
        *query.stride(), *key_strides, *value_strides, out.stride(0), out.stride(1), block_table.stride(0),
        scale, softcap, *common, sinks is not None,
    )  # fmt: skip
    slopes, sink = out if alibi_slopes is None else alibi_slopes, out if sinks is None else sinks
    tensors = (query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out, slopes, sink)

    most_new = max(SHORT_ROWS // packed, power_of_two(max_query_len))
    all_short = most_new * packed <= MOST_SHORT_ROWS
    mixed = not all_short and requests > 1 and packed <= SHORT_ROWS and max_seq_len > LEAST_KEYS_MIXED
    if not all_short:
        most_new = SHORT_ROWS // packed
        block_m, block_n, warps, stages = LONG_TILE_LARGE if large else LONG_TILE
        route = (most_new + 1 if mixed else 0, LONGEST, False, 1, False, block_m, block_n)
        grid = (heads, requests, -(-max_query_len // block_m))
        _launch(grid, (*tensors, out, out), (*numbers, *route, *tail), sizes=(1,), warps=warps, stages=stages)
    if all_short or mixed:
        block_n, warps, stages = SHORT_TILE_LARGE if large else SHORT_TILE
        most = min(MOST_SPLITS, -(-max_seq_len // (LEAST_KEYS if all_short else LEAST_KEYS_MIXED)))
        splits = _splits(_slots(query.device), requests * kv_heads, most)
        rows = requests * most_new * heads * splits if splits > 1 else 0
        partial = torch.empty(rows * (dim_v + 2), dtype=torch.float32, device=query.device) if rows else out
        statistics = partial[rows * dim_v :] if rows else out
        route = (0, most_new, True, packed, splits > 1, most_new * packed, block_n)
        grid = (kv_heads, requests, splits)
        _launch(
            grid,
            (*tensors, partial, statistics),
            (*numbers, *route, *tail),
            sizes=(splits,),
            warps=warps,
            stages=stages,
        )
        if splits > 1:
            _launch_combine(
                (heads, requests, min(most_new, max_query_len)),
                (query_start_loc, seq_lens, out, sink, partial, statistics),
                (
                    out.stride(0), out.stride(1), heads, dim_v, causal, window, sinks is not None, most_new, most_new,
                    power_of_two(splits), block_n, block_dv,
                ),
                sizes=(splits,),
            )  # fmt: skip
    return out
