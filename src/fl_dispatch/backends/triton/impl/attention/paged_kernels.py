"""The kernels of attention over a paged cache: one for both routes, and one that combines the results of splits."""

from __future__ import annotations

import triton
import triton.language as tl

from .online_softmax import LOG2E, store_part
from .paged_tiles import _share, _span, _tiles


@triton.jit(do_not_specialize=["splits", "TABLE_ROW"])
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
    key_scales,
    value_scales,
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
    KEY_SCALES_BLOCK,
    KEY_SCALES_SLOT,
    KEY_SCALES_HEAD,
    VALUE_SCALES_BLOCK,
    VALUE_SCALES_SLOT,
    VALUE_SCALES_HEAD,
    SCALE,
    SOFTCAP,
    VALUE_SCALE,
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
    QUANTIZED: tl.constexpr,
    SCALED: tl.constexpr,
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
        position = length - new + token
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
            key_units = key_scales + kv_head.to(tl.int64) * KEY_SCALES_HEAD
            value_units = value_scales + kv_head.to(tl.int64) * VALUE_SCALES_HEAD
            table = block_table + request.to(tl.int64) * TABLE_ROW
            acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
            m_i = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
            l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
            slope = l_i
            if ALIBI:
                slope = tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32)
            if SINKS and not DIVIDED:
                m_i = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
                l_i += 1.0
            # Spans of tiles: the front edge of a window, those that every query sees as a whole, and the rest.
            FIRST_SPAN: tl.constexpr = 2 if SHORT else (0 if WINDOW > 0 else 1)
            whole_start, whole_stop = start, start
            if not SHORT:
                before = length - new + first
                last = tl.minimum(before + TOKENS, length) - 1
                whole_stop = stop // BLOCK_N * BLOCK_N
                if CAUSAL:
                    whole_stop = (before + 1) // BLOCK_N * BLOCK_N
                if WINDOW > 0:
                    if not CAUSAL:
                        whole_stop = tl.minimum(length, before + WINDOW) // BLOCK_N * BLOCK_N
                    whole_start = tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
                    whole_start = tl.minimum(whole_start, tl.cdiv(stop, BLOCK_N) * BLOCK_N)
                whole_stop = tl.maximum(whole_start, whole_stop)
            for span in tl.static_range(FIRST_SPAN, 3):
                if span == 0:
                    span_start, span_stop = start, tl.minimum(whole_start, stop)
                elif span == 1:
                    span_start, span_stop = whole_start, whole_stop
                else:
                    span_start, span_stop = whole_stop, stop
                acc, m_i, l_i = _tiles(
                    acc, m_i, l_i, q, key, value, key_units, value_units, table, span_start, span_stop, first_seen,
                    length, position, slope, SCALE, SOFTCAP, KEY_BLOCK, KEY_SLOT, KEY_DIM, VALUE_BLOCK, VALUE_SLOT,
                    VALUE_DIM, KEY_SCALES_BLOCK, KEY_SCALES_SLOT, VALUE_SCALES_BLOCK, VALUE_SCALES_SLOT,
                    DIM, DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_SIZE, CAUSAL, WINDOW,
                    CAPPED, ALIBI, SCALED, MASKED=span != 1, PRECISION=PRECISION, NARROW=NARROW,
                )  # fmt: skip
            if QUANTIZED:
                acc *= VALUE_SCALE
            inside = valid[:, None] & (dim_v[None, :] < DIM_V)
            if not DIVIDED:
                result = acc / l_i[:, None]
                target = (begin + token).to(tl.int64) * OUT_TOKEN + head * OUT_HEAD
                tl.store(out + target[:, None] + dim_v[None, :], result.to(out.dtype.element_ty), mask=inside)
            else:
                index = ((request * TOKENS + token).to(tl.int64) * HEADS + head) * splits + split
                store_part(partial, statistics, index, dim_v, acc, m_i, l_i, valid, inside, DIM_V)


@triton.jit(do_not_specialize=["splits", "most_new"])
def _combine(
    query_starts,
    lengths,
    out,
    sinks,
    partial,
    statistics,
    splits,
    most_new,
    OUT_TOKEN,
    OUT_HEAD,
    HEADS: tl.constexpr,
    DIM_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
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
    if (token < new) & (new <= most_new):
        low, high = _span(tl.load(lengths + request), new, 0, most_new, BLOCK_N, CAUSAL, WINDOW)
        share = _share(low, high, splits, BLOCK_N)
        split = tl.arange(0, BLOCK_SPLITS)
        used = (split < splits) & (low + split * share < high)
        dim = tl.arange(0, BLOCK_DV)
        index = ((request * most_new + token).to(tl.int64) * HEADS + head) * splits + split
        m_parts = tl.load(statistics + index * 2, mask=used, other=-1e30)
        l_parts = tl.load(statistics + index * 2 + 1, mask=used, other=0.0)
        m_i = tl.max(m_parts, axis=0)
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            m_i = tl.maximum(m_i, sink)
        alpha = tl.exp2(m_parts - m_i)
        l_i = tl.sum(l_parts * alpha, axis=0)
        if SINKS:
            l_i += tl.exp2(sink - m_i)
        parts = tl.load(
            partial + index[:, None] * DIM_V + dim[None, :], mask=used[:, None] & (dim[None, :] < DIM_V), other=0.0
        )
        result = tl.sum(parts * alpha[:, None], axis=0) / l_i
        target = out + (begin + token).to(tl.int64) * OUT_TOKEN + head * OUT_HEAD
        tl.store(target + dim, result.to(out.dtype.element_ty), mask=dim < DIM_V)
