"""The experts of a mixture: two grouped matrix products and a sum.

Pairs of a token and a choice are sorted by expert into blocks, and a program multiplies the rows of a block with a tile
of that expert's weights. The first product loads the rows of gate and ``up`` alternately, so that both of an element
meet in one thread and the activation costs no memory. It writes in sorted order, which the second product reads as it
lies. Few pairs are not sorted: each is a block of its own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.moe import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS

from .alignment import moe_align_block_size
from .launch import Launcher, power_of_two

SUM_BLOCK, SUM_BLOCK_WIDE = 1024, 512
"""Columns that a program adds up; the smaller number for float32."""
FEW = 4
"""Where experts are so many times more than pairs, pairs are not sorted."""


class Tile(NamedTuple):
    """Of one product: rows of weights, length of a step, warps, stages, blocks that share weights side by side."""

    columns: int
    depth: int
    warps: int
    stages: int
    together: int = 1


class Plan(NamedTuple):
    """Rows of a block, and the tiles of both products."""

    rows: int
    up: Tile
    down: Tile


PLANS: tuple[tuple[int, Plan], ...] = (
    (8, Plan(16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))),
    (16, Plan(32, Tile(128, 128, 4, 3), Tile(128, 128, 4, 3))),
    (48, Plan(64, Tile(128, 64, 4, 3), Tile(128, 64, 4, 4))),
)
"""By pairs for each expert, up to so many."""
LARGE_PLAN = Plan(128, Tile(256, 64, 8, 3, 8), Tile(256, 64, 8, 4, 8))
WIDE_PLAN = Plan(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
"""For float32, whose products are exact and slow."""


@triton.jit
def _activated(x, up, ACTIVATION: tl.constexpr):
    """The activation without its factor ``up``, which only ``swigluoai`` changes and so takes in."""
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
    """Which block and which tile a program takes: ``TOGETHER`` blocks go through the tiles side by side."""
    if TOGETHER == 1:
        return program // tiles, program % tiles
    group = program // (TOGETHER * tiles)
    first = group * TOGETHER
    size = tl.minimum(blocks - first, TOGETHER)
    inside = program % (TOGETHER * tiles)
    return first + inside % size, inside // size


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
    SORTED: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of ``hidden_states`` times ``w13``, activated. Grid: blocks times tiles of weights."""
    ROWS: tl.constexpr = 2 * INNER if GATED else INNER
    block, tile = _tile(tl.program_id(0), blocks, tl.cdiv(ROWS, BLOCK_N), TOGETHER)
    row = tl.arange(0, BLOCK_M)
    if SORTED:
        last = tl.load(padded)
        if block * BLOCK_M >= last:
            return
        expert = tl.load(expert_ids + block)
        pair = tl.load(sorted_ids + block * BLOCK_M + row)
        place = block * BLOCK_M + row
        seen = pair < pairs
    else:
        expert = tl.load(topk_ids + block).to(tl.int32)
        if MAPPED:
            expert = tl.load(expert_map + expert, mask=expert >= 0, other=-1)
        if expert < 0:
            return
        pair = block + row
        place = pair
        seen = row == 0
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = column
    if GATED and ACTIVATION != "swigluoai":
        weight_row = column % 2 * INNER + column // 2
    weight_row = tl.where(column < ROWS, weight_row, 0)
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
    if WEIGHTED:
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
        y = _activated(acc, acc, ACTIVATION)
    target = inner_states + place.to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(target, y.to(inner_states.dtype.element_ty), mask=seen[:, None] & (column < INNER)[None, :])


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
    SORTED: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sorted rows of ``inner_states`` times ``w2``, one output row a pair. Grid: blocks times tiles of weights."""
    block, tile = _tile(tl.program_id(0), blocks, tl.cdiv(HIDDEN, BLOCK_N), TOGETHER)
    row = tl.arange(0, BLOCK_M)
    if SORTED:
        last = tl.load(padded)
        if block * BLOCK_M >= last:
            return
        expert = tl.load(expert_ids + block)
        pair = tl.load(sorted_ids + block * BLOCK_M + row)
        place = block * BLOCK_M + row
        seen = pair < pairs
    else:
        expert = tl.load(topk_ids + block).to(tl.int32)
        if MAPPED:
            expert = tl.load(expert_map + expert, mask=expert >= 0, other=-1)
        if expert < 0:
            return
        pair = block + row
        place = pair
        seen = row == 0
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.where(column < HIDDEN, column, 0)
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
    if BIASED:
        acc += tl.load(bias + expert.to(tl.int64) * BIAS_ROW + weight_row).to(tl.float32)[None, :]
    if WEIGHTED:
        acc = acc * tl.load(topk_weights + pair, mask=seen, other=0.0).to(tl.float32)[:, None]
    target = outputs + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(target, acc.to(outputs.dtype.element_ty), mask=seen[:, None] & (column < HIDDEN)[None, :])


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
    """With ``CHOSEN`` only the choices that have an expert here count. A program for a token and a tile of columns."""
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


_launch_up = Launcher(_up)
_launch_down = Launcher(_down)
_launch_sum = Launcher(_sum)


def _result(like: Tensor, shape: tuple[int, int], out: Tensor | None) -> Tensor:
    if out is None:
        return like.new_empty(shape)
    if out.stride(1) != 1:
        raise NotSupported("the elements of a row of 'out' do not lie side by side")
    return out


def moe_sum(x: Tensor, out: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.moe.moe_sum`."""
    tokens, _, hidden = x.shape
    out = _result(x, (tokens, hidden), out)
    if x.stride(2) != 1:
        x = x.contiguous()
    if tokens and hidden:
        _add_up(x, out, None, None)
    return out


def _add_up(x: Tensor, out: Tensor, topk_ids: Tensor | None, expert_map: Tensor | None) -> None:
    """The sum over ``x``'s middle dimension; with ``topk_ids`` of the choices alone that have an expert here."""
    tokens, topk, hidden = x.shape
    block = SUM_BLOCK_WIDE if x.dtype is torch.float32 else SUM_BLOCK
    _launch_sum(
        (tokens * -(-hidden // block), 1, 1),
        (x, x if topk_ids is None else topk_ids, x if expert_map is None else expert_map, out),
        (
            x.stride(0),
            x.stride(1),
            out.stride(0),
            topk,
            hidden,
            topk_ids is not None,
            expert_map is not None,
            power_of_two(topk),
            block,
        ),
    )


@functools.cache
def _plan(pairs: int, experts: int, wide: bool) -> Plan:
    """What fits so many pairs of so many experts."""
    if wide:
        return WIDE_PLAN
    return next((plan for most, plan in PLANS if pairs <= most * experts), LARGE_PLAN)


def _strides(weights: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
    return weights.stride(0), weights.stride(1), 0 if bias is None else bias.stride(0)


def _multiply(
    launch: Launcher, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], tile: Tile, pairs: int, blocks: int
) -> None:
    """Launch one product: ``tensors`` begin with the rows and the weights."""
    wide = tensors[0].dtype is torch.float32
    launch(
        (blocks * -(-tensors[1].shape[1] // tile.columns), 1, 1),
        tensors,
        (*numbers, tile.columns, tile.depth, tile.together, "ieee" if wide else "tf32"),  # half types take no notice
        sizes=(pairs, blocks),
        warps=tile.warps,
        stages=tile.stages,
    )


def fused_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.moe.fused_moe`. Declines float64, and weights whose rows are strided."""
    if activation not in GATED_ACTIVATIONS and activation not in PLAIN_ACTIVATIONS:
        raise NotSupported(f"activation '{activation}'")
    if hidden_states.dtype is torch.float64:
        raise NotSupported("float64")
    if any(weights is not None and weights.stride(-1) != 1 for weights in (w13, w2, w13_bias, w2_bias)):
        raise NotSupported("the elements of a row of the weights do not lie side by side")
    tokens, hidden = hidden_states.shape
    out = _result(hidden_states, (tokens, hidden), out)
    if not tokens or not hidden:
        return out
    experts, inner = w2.shape[0], w2.shape[2]
    if not experts:
        return out.zero_()
    if hidden_states.stride(1) != 1:
        hidden_states = hidden_states.contiguous()
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    topk = topk_ids.shape[1]
    pairs = tokens * topk
    mapped = expert_map is not None
    map_ = topk_ids if expert_map is None else expert_map
    numbered = experts if expert_map is None else expert_map.shape[0]  # the pairs are for these, here or not
    plan = _plan(power_of_two(tokens) * topk, numbered, hidden_states.dtype is torch.float32)
    aligned = pairs * FEW > numbered
    if aligned:
        order = moe_align_block_size(topk_ids, plan.rows, numbered, expert_map)
        blocks, places = order[1].shape[0], order[0].shape[0]
    else:
        order = (topk_ids, topk_ids, topk_ids)
        blocks, places = pairs, pairs
    gated = activation in GATED_ACTIVATIONS
    inner_states = hidden_states.new_empty((places, inner))
    outputs = hidden_states.new_empty((pairs, hidden))
    routing = (topk_weights, topk_ids, map_, *order)
    activated = (activation.removesuffix("_no_mul"), gated, w13_bias is not None, apply_router_weight_on_input)
    numbers: tuple[Any, ...] = (hidden_states.stride(0), *_strides(w13, w13_bias), topk, hidden, inner, *activated)
    tensors = (hidden_states, w13, w13 if w13_bias is None else w13_bias, *routing, inner_states)
    _multiply(_launch_up, tensors, (*numbers, aligned, mapped, plan.rows), plan.up, pairs, blocks)
    numbers = (*_strides(w2, w2_bias), hidden, inner, w2_bias is not None, not apply_router_weight_on_input)
    tensors = (inner_states, w2, w2 if w2_bias is None else w2_bias, *routing, outputs)
    _multiply(_launch_down, tensors, (*numbers, aligned, mapped, plan.rows), plan.down, pairs, blocks)
    _add_up(outputs.view(tokens, topk, hidden), out, topk_ids, expert_map)
    return out
