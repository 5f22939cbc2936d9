"""Products of one row that is normalized before, and gated after, in the kernel that reads the weight.

A step of one request waits for its small kernels as long as for a third of its products. A program multiplies a few
columns element by element, as in :mod:`.linear`, and computes the norm of the row itself: the sum of squares beside
the product, which is scaled at the end, so that nothing waits for the sum. Rows are not quantized for a quantized
weight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.declaration import HALF_TYPES

from .activation import gated as gated_product
from .ahead import after, ask
from .launch import Launcher, compiles, fitting, power_of_two, processors

COLUMNS, ENOUGH = 4, 1536
"""Columns of a program, where that makes so many programs; else one."""
AT_ONCE = 4096
"""Bytes of a column, at most, that such a program multiplies at a time."""
UNIT = 16
"""Bytes of a column that a thread adds up by itself."""
STAYING = 0
"""Programs a processor that keep a normalized row and take columns in turn; 0: each reads the row for its columns."""
KEPT_COLUMNS = 4
KEPT_WARPS = 4
WARPS = 4


@triton.jit
def _finish(y, scale, bias, out, there, half, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr,
            GATED: tl.constexpr):
    if SCALE == 2:
        y *= tl.load(scale + there).to(tl.float32)
    elif SCALE == 1:
        y *= tl.load(scale).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + there).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.reshape(y, (COLUMNS, 2)))
        y = gated_product(gate, up, "silu")
    return y


@triton.jit
def _row(
    x,
    residual,
    norm_weight,
    weight,
    scale,
    bias,
    out,
    total_out,
    next_weight,
    inner,
    columns,
    WEIGHT_ROW,
    SIZE,
    SLICE,
    FIRST,
    NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASKS: tl.constexpr,
):
    """``columns``: of the result; with ``GATED`` each is made of two of the weight, whose numbers lie side by side.

    ``SCALE``: 0 none, 1 one for all columns, 2 one for each. ``SIZE`` to ``FIRST``, ``ASKS``: see :mod:`.ahead`.
    """
    TILE: tl.constexpr = COLUMNS * 2 if GATED else COLUMNS
    UNITS: tl.constexpr = BLOCK // UNIT
    first = tl.program_id(0) * COLUMNS
    place = tl.arange(0, TILE)
    if GATED:
        there = tl.minimum(first + place // 2, columns - 1) + place % 2 * columns
    else:
        there = tl.minimum(first + place, columns - 1)
    element = tl.arange(0, BLOCK)
    source = weight + there.to(tl.int64)[:, None] * WEIGHT_ROW + element[None, :]
    acc = tl.zeros([TILE, UNITS], dtype=tl.float32)
    squares = tl.zeros([UNITS], dtype=tl.float32)
    written = tl.where(tl.program_id(0) == 0, inner, 0)
    for start in range(0, inner, BLOCK):
        inside = start + element < inner
        if EVEN:
            b = tl.load(source + start, eviction_policy="evict_first")
            a = tl.load(x + start + element).to(tl.float32)
        else:
            b = tl.load(source + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            a = tl.load(x + start + element, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            a += tl.load(residual + start + element, mask=inside, other=0.0).to(tl.float32)
            tl.store(total_out + start + element, a.to(total_out.dtype.element_ty), mask=start + element < written)
        if NORM:
            squares += tl.sum((a * a).reshape(UNITS, UNIT), axis=1)
            a *= tl.load(norm_weight + start + element, mask=inside, other=0.0).to(tl.float32)
        acc += tl.sum((b.to(tl.float32) * a[None, :]).reshape(TILE, UNITS, UNIT), axis=2)
    y = tl.sum(acc, axis=1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / inner + EPSILON)
    y = _finish(y, scale, bias, out, there, columns, SCALE, HAS_BIAS, COLUMNS, GATED)
    column = first + tl.arange(0, COLUMNS)
    tl.store(out + column, y, mask=column < columns)
    if ASKS:
        ask(next_weight, SIZE, SLICE, FIRST)


@triton.jit
def _kept(
    x,
    residual,
    norm_weight,
    weight,
    scale,
    bias,
    out,
    total_out,
    next_weight,
    inner,
    columns,
    WEIGHT_ROW,
    SIZE,
    SLICE,
    FIRST,
    NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASKS: tl.constexpr,
):
    """As :func:`_row`, but programs keep the row, ``BLOCK`` elements, and take columns in turn."""
    TILE: tl.constexpr = COLUMNS * 2 if GATED else COLUMNS
    place = tl.arange(0, TILE)
    element = tl.arange(0, BLOCK)
    inside = element < inner
    a = tl.load(x + element, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        a += tl.load(residual + element, mask=inside, other=0.0).to(tl.float32)
        written = tl.where(tl.program_id(0) == 0, inner, 0)
        tl.store(total_out + element, a.to(total_out.dtype.element_ty), mask=element < written)
    if NORM:
        factor = tl.rsqrt(tl.sum(a * a, axis=0) / inner + EPSILON)
        a *= tl.load(norm_weight + element, mask=inside, other=0.0).to(tl.float32)
        a *= factor
    row = a[None, :]
    for first in range(tl.program_id(0) * COLUMNS, columns, tl.num_programs(0) * COLUMNS):
        if GATED:
            there = tl.minimum(first + place // 2, columns - 1) + place % 2 * columns
        else:
            there = tl.minimum(first + place, columns - 1)
        source = weight + there.to(tl.int64)[:, None] * WEIGHT_ROW + element[None, :]
        if EVEN:
            b = tl.load(source, eviction_policy="evict_first")
        else:
            b = tl.load(source, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        y = tl.sum(b.to(tl.float32) * row, axis=1)
        y = _finish(y, scale, bias, out, there, columns, SCALE, HAS_BIAS, COLUMNS, GATED)
        column = first + tl.arange(0, COLUMNS)
        tl.store(out + column, y, mask=column < columns)
    if ASKS:
        ask(next_weight, SIZE, SLICE, FIRST)


_launch_row = Launcher(_row)
_launch_kept = Launcher(_kept)


def supports(x: Tensor, weight: Tensor, *others: object) -> bool | str:
    """One row."""
    if x.shape[:-1].numel() != 1:
        return "more than one row"
    return compiles(weight.dtype, weight.device)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.joined.fused_linear`."""
    columns, inner = weight.shape
    columns = columns // 2 if gated else columns
    out = x.new_empty((*x.shape[:-1], columns))
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    tensors = (
        x,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        weight,
        x if scale is None else scale,
        x if bias is None else bias,
        out,
        out if residual is None else total,
    )
    kinds = (
        norm_weight is not None, residual is not None, epsilon, 0 if scale is None else min(2, scale.numel()),
        bias is not None, gated,
    )  # fmt: skip
    if STAYING and norm_weight is not None:
        at_once, block = KEPT_COLUMNS // 2 if gated else KEPT_COLUMNS, power_of_two(inner)
        programs = min(STAYING * processors(x.device), -(-columns // at_once))
        upcoming, where, asks = after(weight, programs)
        _launch_kept(
            (programs, 1, 1),
            (*tensors, upcoming),
            (inner, columns, weight.stride(0), *where, *kinds, inner == block, block, at_once, asks),
            warps=KEPT_WARPS,
        )
        return out, total
    most = COLUMNS // 2 if gated else COLUMNS
    at_once = most if columns >= most * ENOUGH else 1
    block = fitting(inner, AT_ONCE // weight.element_size())
    programs = -(-columns // at_once)
    upcoming, where, asks = after(weight, programs)
    unit = min(UNIT // weight.element_size(), block)
    numbers: tuple[Any, ...] = (
        inner, columns, weight.stride(0), *where, *kinds, inner % block == 0, unit, block, at_once, asks,
    )  # fmt: skip
    _launch_row((programs, 1, 1), (*tensors, upcoming), numbers, warps=WARPS)
    return out, total
