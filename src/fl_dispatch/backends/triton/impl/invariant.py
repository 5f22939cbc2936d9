"""Kernels with bit-for-bit equal results for a row in every batch, because tiles do not depend on the number of rows.

A row of a product on matrix units depends neither on the tile's other rows nor on its position in the tile, and one
program sums it along its whole length. ``test_invariant.py`` and ``tests/gpu`` check this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported

from .attention.paged import LONGEST, _launch, prepare
from .experts import fused_moe as grouped
from .experts import routing

TILE = (64, 64, 64, 4)
"""Rows, columns, step along the rows, and warps of a product."""
TILE_WIDE = (32, 32, 32, 4)
"""``TILE`` for float32."""
STAGES = 3
ATTENTION = (64, 64, 4, 3)
"""Rows (queries times heads of a group), keys, warps, stages; see :data:`.attention.paged.LONG_TILE`."""
ATTENTION_LARGE = (32, 32, 4, 2)
"""``ATTENTION`` in the cases of :data:`.attention.paged.LONG_TILE_LARGE`."""
EXPERTS = grouped.Plans((), grouped.Plan(32, grouped.Tile(64, 64, 4, 3), grouped.Tile(64, 64, 4, 3)))


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    bias,
    out,
    rows,
    inner,
    columns,
    X_ROW,
    X_INNER,
    WEIGHT_ROW,
    WEIGHT_INNER,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid: tiles of columns, tiles of rows."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = tl.minimum(column, columns - 1).to(tl.int64)
    element = tl.arange(0, STEP)
    left = x + row[:, None] * X_ROW + element[None, :] * X_INNER
    right = weight + there[None, :] * WEIGHT_ROW + element[:, None] * WEIGHT_INNER
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, inner, STEP):
        inside = start + element < inner
        a = tl.load(left, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right, mask=inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        left += STEP * X_INNER
        right += STEP * WEIGHT_INNER
    if HAS_BIAS:
        acc += tl.load(bias + there).to(tl.float32)[None, :]
    target = out + row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


_launch_product = Launcher(_product)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.linear.linear`. Declines float64; gives no gradients."""
    columns, inner = weight.shape
    if x.dtype is torch.float64:
        raise NotSupported("float64")
    if x.shape[-1:] != (inner,) or any(
        each.dtype is not x.dtype for each in (weight, *(() if bias is None else (bias,)))
    ):
        return torch.nn.functional.linear(x, weight, bias)  # PyTorch raises its own error
    out = x.new_empty((*x.shape[:-1], columns))
    if x.dim() != 2:
        x = x.reshape(-1, inner)
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    rows, wide = len(x), x.dtype is torch.float32
    if rows and columns:
        at_once, wide_columns, step, warps = TILE_WIDE if wide else TILE
        _launch_product(
            (-(-columns // wide_columns), -(-rows // at_once), 1),
            (x, weight, out if bias is None else bias, out),
            (
                inner, columns, *x.stride(), *weight.stride(), bias is not None, "ieee" if wide else "tf32", at_once,
                wide_columns, step,
            ),
            sizes=(rows,),
            warps=warps,
            stages=STAGES,
        )  # fmt: skip
    return out


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
    key_scale: float | None = None,
    value_scale: float | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.attention.paged_attention`. Declines float64, and an ``out`` with strided elements.

    Prompts and decode share one route, on which a program takes all keys of its queries, so a query's result also does
    not depend on how a prompt is split.
    """
    call = prepare(
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens, scale, out, causal, sliding_window,
        softcap, alibi_slopes, sinks, key_scale, value_scale,
    )  # fmt: skip
    requests = seq_lens.shape[0]
    if not requests or not query.shape[0] or not max_query_len:
        return call.out
    block_m, block_n, warps, stages = ATTENTION_LARGE if call.large else ATTENTION
    block_m = max(block_m, call.packed)
    route = (0, LONGEST, True, call.packed, False, block_m, block_n)
    grid = (key_cache.shape[2], requests, -(-max_query_len // (block_m // call.packed)))
    tensors = (*call.tensors, call.out, call.out)
    _launch(grid, tensors, (*call.numbers, *route, *call.tail), sizes=(1,), warps=warps, stages=stages)
    return call.out


topk_softmax, topk_sigmoid = (routing.best(sigmoid, alone=True) for sigmoid in (False, True))
grouped_topk = routing.best_of_groups(alone=True)
fused_moe = grouped.mixture(EXPERTS, grouped.WIDE_PLANS)
