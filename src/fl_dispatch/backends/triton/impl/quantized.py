"""Products with quantized weights: each program has some columns of some rows, and goes along their elements.

Weights are read as they are stored, and become numbers only in registers. If rows are quantized too, the scales of rows
and columns stay out of the sum; a block's scale enters it with the block. Weights of 4 bits lie two in a byte: the even
and the odd elements of a row are multiplied apart, so that nothing has to be put side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.errors import NotSupported

from .launch import Launcher, power_of_two

FEW_ROWS = 16
"""Rows of the least product that matrix units take."""
MOST_ROWS = 64
COLUMNS = 64
INNER = 128
"""Elements that a program multiplies at a time, unless a group of scales is shorter."""
WARPS, STAGES = 4, 4


@triton.jit(do_not_specialize=["rows"])
def _scaled(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    rows,
    inner,
    columns,
    X_ROW,
    WEIGHT_ROW,
    SCALES,
    COLUMN_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCKS: tl.constexpr,
    INTEGERS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """``BLOCKS``: elements of a block's side, of which there are ``SCALES`` along a row; 0 without blocks."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    a_row, b_row = tl.minimum(row, rows - 1).to(tl.int64), tl.minimum(column, columns - 1).to(tl.int64)
    element = tl.arange(0, INNER)
    left = x + a_row[:, None] * X_ROW + element[None, :]
    right = weight + b_row[None, :] * WEIGHT_ROW + element[:, None]
    if INTEGERS:
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    else:
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, inner, INNER):
        if EVEN:
            a = tl.load(left + start)
            b = tl.load(right + start)
        else:
            inside = start + element < inner
            a = tl.load(left + start, mask=inside[None, :], other=0.0)
            b = tl.load(right + start, mask=inside[:, None], other=0.0)
        if INTEGERS:
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        elif BLOCKS:
            part = start // BLOCKS
            x_factor = tl.load(x_scale + a_row * SCALES + part)
            factor = tl.load(weight_scale + (b_row // BLOCKS) * SCALES + part)
            acc += tl.dot(a, b) * x_factor[:, None] * factor[None, :]
        else:
            acc = tl.dot(
                a, b, acc, max_num_imprecise_acc=INNER
            )  # else Hopper sums a whole row in its short accumulator
    y = acc.to(tl.float32)
    if not BLOCKS:
        y = y * tl.load(x_scale + a_row)[:, None] * tl.load(weight_scale + b_row * COLUMN_SCALE)[None, :]
    if HAS_BIAS:
        y += tl.load(bias + b_row).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < columns))


@triton.jit(do_not_specialize=["rows"])
def _weight_only(
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    rows,
    inner,
    columns,
    X_ROW,
    WEIGHT_ROW,
    GROUP,
    GROUPS,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """``INNER``: stored elements at a time, within one group of ``GROUP`` of them; ``inner`` counts those too."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    a_row, b_row = tl.minimum(row, rows - 1).to(tl.int64), tl.minimum(column, columns - 1).to(tl.int64)
    element = tl.arange(0, INNER)
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for group in range(GROUPS):
        factor = tl.load(scale + b_row * GROUPS + group).to(tl.float32)
        if HAS_ZERO:
            offset = tl.load(zero + b_row * GROUPS + group).to(tl.float32)
        else:
            offset = tl.full([COLUMNS], 8.0 if FOUR_BITS else 0.0, dtype=tl.float32)
        part = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, GROUP, INNER):
            inside = start + element < GROUP
            place = group * GROUP + start + element
            stored = tl.load(weight + b_row[None, :] * WEIGHT_ROW + place[:, None], mask=inside[:, None], other=0.0)
            if FOUR_BITS:
                left = x + a_row[:, None] * X_ROW + 2 * place[None, :]
                even = tl.load(left, mask=inside[None, :], other=0.0)
                odd = tl.load(left + 1, mask=inside[None, :], other=0.0)
                low = (stored & 15).to(tl.float32) - offset[None, :]
                high = (stored >> 4).to(tl.float32) - offset[None, :]
                part = tl.dot(even, low.to(even.dtype), part, input_precision="ieee")
                part = tl.dot(odd, high.to(odd.dtype), part, input_precision="ieee")
            else:
                a = tl.load(x + a_row[:, None] * X_ROW + place[None, :], mask=inside[None, :], other=0.0)
                number = stored.to(tl.float32)
                if HAS_ZERO:
                    number -= offset[None, :]
                part = tl.dot(a, number.to(a.dtype), part, input_precision="ieee")
        acc += part * factor[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + b_row).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < columns))


_launch_scaled = Launcher(_scaled)
_launch_weight_only = Launcher(_weight_only)


def _rows_at_once(rows: int) -> int:
    return min(MOST_ROWS, max(FEW_ROWS, power_of_two(rows)))


def _refuse_strided(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if any(each is not None and each.numel() and each.stride(-1) != 1 for each in (x, weight, bias)):
        raise NotSupported("elements of a row, of a column or of the bias that do not lie side by side")


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.scaled_linear`."""
    columns, inner = weight.shape
    if x.dtype is not weight.dtype or x_scale.dtype is not torch.float32:
        raise NotSupported("rows and weights of one type, and scales of float32")
    if block_size and (block_size < FEW_ROWS * 2 or block_size & (block_size - 1) or x.dtype is torch.int8):
        raise NotSupported("blocks of fp8, whose side is a power of two from 32 on")
    _refuse_strided(x, weight, bias)
    out = x.new_empty((*x.shape[:-1], columns), dtype=getattr(torch, dtype))
    if not out.numel():
        return out
    x = x.reshape(-1, inner)
    rows, at_once = x.shape[0], min(INNER, block_size or INNER)
    tall = _rows_at_once(rows)
    _launch_scaled(
        (-(-columns // COLUMNS), -(-rows // tall), 1),
        (x, x_scale.contiguous(), weight, weight_scale.contiguous(), out if bias is None else bias, out),
        (
            inner, columns, x.stride(0), weight.stride(0), x_scale.shape[-1], int(weight_scale.numel() > 1),
            bias is not None, block_size, x.dtype is torch.int8, inner % at_once == 0, tall, COLUMNS, at_once,
        ),
        sizes=(rows,),
        warps=WARPS,
        stages=STAGES,
    )  # fmt: skip
    return out


def weight_only_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.weight_only_linear`."""
    columns, stored = weight.shape
    if x.dtype is torch.float64:
        raise NotSupported("float64")
    _refuse_strided(x, weight, bias)
    out = x.new_empty((*x.shape[:-1], columns))
    if not out.numel():
        return out
    rows = x.reshape(-1, x.shape[-1])
    groups, tall = scale.shape[1], _rows_at_once(rows.shape[0])
    group = stored // groups
    _launch_weight_only(
        (-(-columns // COLUMNS), -(-rows.shape[0] // tall), 1),
        (
            rows, weight, scale.contiguous(), scale if zero is None else zero.contiguous(),
            out if bias is None else bias, out,
        ),
        (
            stored, columns, rows.stride(0), weight.stride(0), group, groups, zero is not None, bias is not None,
            weight.dtype is torch.uint8, tall, COLUMNS, min(INNER, max(FEW_ROWS, power_of_two(group))),
        ),
        sizes=(rows.shape[0],),
        warps=WARPS,
        stages=STAGES,
    )  # fmt: skip
    return out
