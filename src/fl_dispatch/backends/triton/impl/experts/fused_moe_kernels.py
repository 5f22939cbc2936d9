"""The kernels of mixtures of experts: two grouped matrix products and a sum."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activated(x, up, ACTIVATION: tl.constexpr):
    """Return the activation of ``x``, without the factor ``up`` except for ``swigluoai``, which clamps ``up`` too."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0)
        y = y * y
    else:  # swigluoai
        x = tl.minimum(x, 7.0)
        y = x * tl.sigmoid(1.702 * x) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0)
    return y


@triton.jit
def _tile(program, blocks, tiles, TOGETHER: tl.constexpr):
    """Return a program's block and tile: ``TOGETHER`` blocks go through the tiles side by side."""
    if TOGETHER == 1:
        return program // tiles, program % tiles
    group = program // (TOGETHER * tiles)
    first = group * TOGETHER
    size = tl.minimum(blocks - first, TOGETHER)
    inside = program % (TOGETHER * tiles)
    return first + inside % size, inside // size


@triton.jit
def _block_expert(
    block, topk_ids, expert_map, padded, SORTED: tl.constexpr, MAPPED: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return a block's expert (0 if pairs are sorted, see :func:`_block_pairs`), and whether it is idle.

    A sorted block is idle after the last pair, an unsorted one if its pair's expert is on another rank.
    """
    if SORTED:
        return 0, block * BLOCK_M >= tl.load(padded)
    expert = tl.load(topk_ids + block).to(tl.int32)
    if MAPPED:
        expert = tl.load(expert_map + expert, mask=expert >= 0, other=-1)
    return expert, expert < 0


@triton.jit
def _block_pairs(block, row, expert, sorted_ids, expert_ids, pairs, SORTED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a block's expert, its rows' pairs, their places in the sorted rows, and which of them exist."""
    if SORTED:
        expert = tl.load(expert_ids + block)
        pair = tl.load(sorted_ids + block * BLOCK_M + row)
        return expert, pair, block * BLOCK_M + row, pair < pairs
    pair = block + row
    return expert, pair, pair, row == 0


@triton.jit
def _weight_rows(
    tile, ROWS: tl.constexpr, INNER: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the rows of weights of a tile; those of gate and ``up`` alternate."""
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = column
    if GATED and ACTIVATION != "swigluoai":
        weight_row = column % 2 * INNER + column // 2
    return tl.where(column < ROWS, weight_row, 0)


@triton.jit
def _finish(
    acc,
    bias,
    topk_weights,
    out,
    expert,
    pair,
    place,
    seen,
    weight_row,
    tile,
    BIAS_ROW,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    WEIGHT_LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store the sums of a tile in rows of ``WIDTH`` columns: weighted, biased, activated if there is an activation."""
    if WEIGHT_FIRST:
        acc = acc * tl.load(topk_weights + pair, mask=seen, other=0.0).to(tl.float32)[:, None]
    if BIASED:
        acc += tl.load(bias + expert.to(tl.int64) * BIAS_ROW + weight_row).to(tl.float32)[None, :]
    if GATED:
        x, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        y = _activated(x, up, ACTIVATION)
        if ACTIVATION != "swigluoai":
            y = y * up
        column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        y = acc
        if ACTIVATION != "":
            y = _activated(acc, acc, ACTIVATION)
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if WEIGHT_LAST:
        y = y * tl.load(topk_weights + pair, mask=seen, other=0.0).to(tl.float32)[:, None]
    target = out + place.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=seen[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _product(
    rows,
    row_seen,
    weights,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``[BLOCK_M, BLOCK_N]`` in float32: rows at ``rows`` times the transposed rows at ``weights``."""
    step = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    a = rows[:, None] + step[None, :]
    b = weights[None, :] + step[:, None]
    for k in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            x = tl.load(a, mask=row_seen[:, None], other=0.0)
            w = tl.load(b)
        else:
            x = tl.load(a, mask=row_seen[:, None] & (step < DEPTH - k)[None, :], other=0.0)
            w = tl.load(b, mask=(step < DEPTH - k)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        a += BLOCK_K
        b += BLOCK_K
    return acc


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _up(
    hidden_states,
    w13,
    bias,
    topk_weights,
    topk_ids,
    expert_map,
    sorted_ids,
    expert_ids,
    padded,
    inner_states,
    pairs,
    blocks,
    HIDDEN_ROW,
    EXPERT_STRIDE,
    WEIGHT_ROW,
    BIAS_ROW,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
    SORTED: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Rows of ``hidden_states`` times ``w13``, activated. Grid: blocks times tiles of weights."""
    ROWS: tl.constexpr = 2 * INNER if GATED else INNER
    block, tile = _tile(tl.program_id(0), blocks, tl.cdiv(ROWS, BLOCK_N), TOGETHER)
    row = tl.arange(0, BLOCK_M)
    expert, idle = _block_expert(block, topk_ids, expert_map, padded, SORTED, MAPPED, BLOCK_M)
    if idle:
        return
    expert, pair, place, seen = _block_pairs(block, row, expert, sorted_ids, expert_ids, pairs, SORTED, BLOCK_M)
    weight_row = _weight_rows(tile, ROWS, INNER, GATED, ACTIVATION, BLOCK_N)
    acc = _product(
        hidden_states + (pair // TOPK).to(tl.int64) * HIDDEN_ROW,
        seen,
        w13 + expert.to(tl.int64) * EXPERT_STRIDE + weight_row * WEIGHT_ROW,
        HIDDEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
    )
    _finish(
        acc, bias, topk_weights, inner_states, expert, pair, place, seen, weight_row, tile, BIAS_ROW, INNER, ACTIVATION,
        GATED, BIASED, WEIGHTED, False, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _down(
    inner_states,
    w2,
    bias,
    topk_weights,
    topk_ids,
    expert_map,
    sorted_ids,
    expert_ids,
    padded,
    outputs,
    pairs,
    blocks,
    EXPERT_STRIDE,
    WEIGHT_ROW,
    BIAS_ROW,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
    SORTED: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Sorted rows of ``inner_states`` times ``w2``, one output row a pair. Grid: blocks times tiles of weights."""
    block, tile = _tile(tl.program_id(0), blocks, tl.cdiv(HIDDEN, BLOCK_N), TOGETHER)
    row = tl.arange(0, BLOCK_M)
    expert, idle = _block_expert(block, topk_ids, expert_map, padded, SORTED, MAPPED, BLOCK_M)
    if idle:
        return
    expert, pair, place, seen = _block_pairs(block, row, expert, sorted_ids, expert_ids, pairs, SORTED, BLOCK_M)
    weight_row = _weight_rows(tile, HIDDEN, HIDDEN, False, "", BLOCK_N)
    acc = _product(
        inner_states + place.to(tl.int64) * INNER,
        seen,
        w2 + expert.to(tl.int64) * EXPERT_STRIDE + weight_row * WEIGHT_ROW,
        INNER,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
    )
    _finish(
        acc, bias, topk_weights, outputs, expert, pair, pair, seen, weight_row, tile, BIAS_ROW, HIDDEN, "", False,
        BIASED, False, WEIGHTED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _sum(
    x,
    topk_ids,
    expert_map,
    out,
    TOKEN_STRIDE,
    CHOICE_STRIDE,
    OUT_ROW,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: tokens times tiles of columns. With ``CHOSEN``, only choices of experts on this rank count."""
    blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, BLOCK_TOPK)
    counts = choice < TOPK
    if CHOSEN:
        expert = tl.load(topk_ids + token * TOPK + choice, mask=counts, other=-1).to(tl.int32)
        if MAPPED:
            expert = tl.load(expert_map + expert, mask=expert >= 0, other=-1)
        counts = expert >= 0
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    source = x + token * TOKEN_STRIDE + choice[:, None] * CHOICE_STRIDE + column[None, :]
    inside = column < HIDDEN
    total = tl.sum(tl.load(source, mask=counts[:, None] & inside[None, :], other=0.0).to(wide), axis=0)
    tl.store(out + token * OUT_ROW + column, total.to(out.dtype.element_ty), mask=inside)
