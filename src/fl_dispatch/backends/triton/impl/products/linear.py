"""Products of few rows with weights, which are bound by reading the weights; PyTorch multiplies many rows.

One row: a program takes few columns and multiplies element by element, so each of its threads has several loads of 16
bytes in flight and nothing waits for matrix units. Two to :data:`MOST_ROWS` rows: a product on matrix units with the
columns as its long side. It takes only small weights, because large ones keep the whole device busy anyway, and only
short columns or many columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.ops.declaration import HALF_TYPES
from fl_dispatch.types import Traits

from ..launch import fitting, power_of_two, shared_memory

COLUMNS = 4
"""Columns of a program with one row if that makes enough programs; else one."""
ENOUGH = 1536
AT_ONCE = 4096
"""Most bytes of a column that a program with one row multiplies at a time."""
MOST_ROWS = 32
TRAITS = Traits(reference_from=MOST_ROWS + 1)
SMALL_WEIGHTS = 1 << 25
"""Most elements of a weight that several rows are multiplied with here."""
SHORT = 3072
"""Most elements of a column in a product with fewer than ``MANY_COLUMNS`` columns."""
MANY_COLUMNS = 4096
"""Fewest columns of a product with columns longer than ``SHORT``."""
TILE = (64, 128, 5)
"""Columns, elements of each column, and stages of a program with several rows."""
SHARED_MEMORY = 120 << 10
"""Bytes of shared memory for the stages of ``TILE``."""


@triton.jit
def _row(
    x,
    weight,
    bias,
    out,
    inner,
    columns,
    WEIGHT_ROW,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = tl.minimum(column, columns - 1)
    element = tl.arange(0, BLOCK)
    source = weight + there.to(tl.int64)[:, None] * WEIGHT_ROW + element[None, :]
    acc = tl.zeros([COLUMNS, BLOCK], dtype=tl.float32)
    for start in range(0, inner, BLOCK):
        if EVEN:
            a = tl.load(x + start + element)
            b = tl.load(source + start, eviction_policy="evict_first")
        else:
            inside = start + element < inner
            a = tl.load(x + start + element, mask=inside, other=0.0)
            b = tl.load(source + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        acc += b.to(tl.float32) * a.to(tl.float32)[None, :]
    y = tl.sum(acc, axis=1)
    if HAS_BIAS:
        y += tl.load(bias + there).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["rows"])
def _rows(
    x,
    weight,
    bias,
    out,
    rows,
    inner,
    columns,
    X_ROW,
    WEIGHT_ROW,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = tl.minimum(column, columns - 1)
    element = tl.arange(0, BLOCK)
    source = weight + there.to(tl.int64)[:, None] * WEIGHT_ROW + element[None, :]
    right = x + row.to(tl.int64)[None, :] * X_ROW + element[:, None]
    acc = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in tl.range(0, inner, BLOCK):
        if EVEN:
            a = tl.load(right + start, mask=row[None, :] < rows, other=0.0)
            b = tl.load(source + start, eviction_policy="evict_first")
        else:
            inside = start + element < inner
            a = tl.load(right + start, mask=inside[:, None] & (row[None, :] < rows), other=0.0)
            b = tl.load(source + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        acc = tl.dot(b, a, acc)
    if HAS_BIAS:
        acc += tl.load(bias + there).to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[None, :] * columns + column[:, None]
    inside = (row[None, :] < rows) & (column[:, None] < columns)
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


_launch_row = Launcher(_row)
_launch_rows = Launcher(_rows)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the kernels can read these tensors in their layout.

    Return False for shapes that PyTorch rejects, so that PyTorch raises its own error.
    """
    columns, inner = weight.shape
    return (
        0 not in weight.shape
        and x.shape[-1:] == (inner,)
        and weight.dtype is x.dtype
        and x.dtype in (torch.float32, *HALF_TYPES)
        and weight.device == x.device
        and weight.stride(1) == 1
        and x.stride(-1) == 1
        and (bias is None or (bias.shape == (columns,) and bias.dtype is x.dtype and bias.stride(0) == 1))
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.linear.linear`. Gives no gradients if a kernel runs."""
    columns, inner = weight.shape
    rows = x.numel() // inner if inner else 0
    single = rows == 1
    few = (
        1 < rows <= MOST_ROWS
        and columns * inner <= SMALL_WEIGHTS
        and (inner <= SHORT or columns >= MANY_COLUMNS)
        and x.dtype in HALF_TYPES
    )
    if not (single or (few and shared_memory(x.device) >= SHARED_MEMORY)) or not _fits(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    out = x.new_empty((*x.shape[:-1], columns))
    tensors = (x, weight, out if bias is None else bias, out)
    has_bias = bias is not None
    if single:
        at_once = COLUMNS if columns >= COLUMNS * ENOUGH else 1
        block = fitting(inner, AT_ONCE // x.element_size())
        _launch_row(
            (-(-columns // at_once), 1, 1),
            tensors,
            (inner, columns, weight.stride(0), has_bias, inner % block == 0, block, at_once),
        )
        return out
    if x.dim() != 2:
        x = x.reshape(rows, inner)
    at_once, block, stages = TILE
    _launch_rows(
        (-(-columns // at_once), 1, 1),
        (x, *tensors[1:]),
        (
            inner, columns, x.stride(0), weight.stride(0), has_bias, inner % block == 0, max(16, power_of_two(rows)),
            block, at_once,
        ),
        sizes=(rows,),
        stages=stages,
    )  # fmt: skip
    return out
