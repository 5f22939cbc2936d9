"""Products of rows as they are with weights of 4 or 8 bits, in three forms.

Weights are read as they are stored. One row: a program multiplies few columns element by element. Some rows: numbers
become a half type in registers, and matrix units multiply them, with the columns as the long side of a tile; the two
numbers of a byte belong to an even and an odd element, which are multiplied apart. Many rows: the weight is dequantized
once in every call, and PyTorch multiplies; reading and writing it is then a small part of the time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.declaration import HALF_TYPES

from .launch import Launcher, compiles, power_of_two, processors, stages_that_fit

FEW_ROWS = 16
"""Rows, and stored elements, of the least product that matrix units take."""
SOME_ROWS = 16
"""Rows up to which matrix units take the numbers from registers; four times as many where a weight has many columns."""
ROW_COLUMNS, ENOUGH = 4, 1024
"""Columns of a program with one row, where that makes so many programs; else one."""
ROW_STORED = 1024
"""Bytes of a column that such a program multiplies at a time: 8 for each of its threads."""
UNIT = 32
"""Elements that are multiplied before a scale is: those of a thread's load, unless groups are shorter."""
STORED = 128
"""Bytes of a column that are multiplied at a time with some rows, unless groups are shorter."""
NARROW, WIDE = (32, 2, 8), (64, 4, 4)
"""Columns, warps and stages for some rows: where wide tiles leave processors idle, and elsewhere."""
DEQUANTIZED = (16, 256, 4)
"""Columns, bytes and warps of a program that dequantizes."""


@triton.jit
def _row(
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    stored,
    columns,
    WEIGHT_ROW,
    GROUP,
    GROUPS,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``stored``: bytes of a column; ``PACKED``: numbers in one; ``GROUP``: elements of one, ``UNIT`` a part of it."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = tl.minimum(column, columns - 1).to(tl.int64)[:, None]
    UNITS: tl.constexpr = BLOCK * PACKED // UNIT
    byte, element, unit = tl.arange(0, BLOCK), tl.arange(0, BLOCK * PACKED), tl.arange(0, UNITS)
    acc = tl.zeros([COLUMNS, UNITS], dtype=tl.float32)
    for start in range(0, stored, BLOCK):
        number = tl.load(
            weight + there * WEIGHT_ROW + (start + byte)[None, :],
            mask=(start + byte < stored)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        a = tl.load(x + start * PACKED + element, mask=start * PACKED + element < stored * PACKED, other=0.0)
        a = a.to(tl.float32).reshape(UNITS, UNIT)
        if PACKED == 2:
            number = tl.interleave(number & 15, number >> 4)
        part = tl.sum(number.to(tl.float32).reshape(COLUMNS, UNITS, UNIT) * a[None, :, :], axis=2)
        inside = (start * PACKED + unit * UNIT < stored * PACKED)[None, :]
        group = ((start * PACKED + unit * UNIT) // GROUP)[None, :]
        if HAS_ZERO:
            offset = tl.load(zero + there * GROUPS + group, mask=inside, other=0.0).to(tl.float32)
            part -= offset * tl.sum(a, axis=1)[None, :]
        elif PACKED == 2:
            part -= 8.0 * tl.sum(a, axis=1)[None, :]
        acc += part * tl.load(scale + there * GROUPS + group, mask=inside, other=0.0).to(tl.float32)
    y = tl.sum(acc, axis=1)
    if HAS_BIAS:
        y += tl.load(bias + tl.minimum(column, columns - 1)).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["rows"])
def _rows(
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    rows,
    stored,
    columns,
    X_ROW,
    WEIGHT_ROW,
    GROUP,
    GROUPS,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STORED: tl.constexpr,
):
    """``STORED`` bytes at a time, a part of a group, which has ``GROUP`` of them."""
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, known = tl.minimum(column, columns - 1).to(tl.int64), row < rows
    byte, element = tl.arange(0, STORED), tl.arange(0, STORED * PACKED)
    left = weight + there[:, None] * WEIGHT_ROW + byte[None, :]
    right = x + row.to(tl.int64)[:, None] * X_ROW + element[None, :]
    acc = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in range(0, stored, STORED):
        number = tl.load(left + start, eviction_policy="evict_first")
        a = tl.load(right + start * PACKED, mask=known[:, None], other=0.0)
        group = start // GROUP
        factor = tl.load(scale + there * GROUPS + group).to(tl.float32)
        if HAS_ZERO:
            offset = tl.load(zero + there * GROUPS + group).to(tl.float32)[:, None]
        else:
            offset = tl.full([COLUMNS, 1], 8.0 if PACKED == 2 else 0.0, dtype=tl.float32)
        part = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
        if PACKED == 2:
            even, odd = a.reshape(ROWS, STORED, 2).split()
            low = ((number & 15).to(tl.float32) - offset).to(a.dtype)
            high = ((number >> 4).to(tl.float32) - offset).to(a.dtype)
            part = tl.dot(low, tl.trans(even), part)
            part = tl.dot(high, tl.trans(odd), part)
        elif HAS_ZERO:
            part = tl.dot((number.to(tl.float32) - offset).to(a.dtype), tl.trans(a), part)
        else:
            part = tl.dot(number.to(a.dtype), tl.trans(a), part)
        acc += part * factor[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + there).to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=known[None, :] & (column[:, None] < columns))


@triton.jit
def dequantized_tile(
    weight,
    scale,
    zero,
    known,
    start,
    stored,
    GROUP,
    HAS_ZERO: tl.constexpr,
    SCALED: tl.constexpr,
    PACKED: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``[COLUMNS, BLOCK * PACKED]`` in float32: ``BLOCK`` of a column's ``stored`` bytes, those from ``start`` on.

    Args:
        weight, scale, zero: where those of a column begin, ``[COLUMNS, 1]``; ``known``: whether there is one.
        GROUP: elements of one, ``UNIT`` a part of it.
        SCALED: else the scale is left to the caller.
    """
    UNITS: tl.constexpr = BLOCK * PACKED // UNIT
    byte = (start + tl.arange(0, BLOCK))[None, :]
    unit = (start * PACKED + tl.arange(0, UNITS) * UNIT)[None, :]
    number = tl.load(weight + byte, mask=known & (byte < stored), other=0.0)
    if PACKED == 2:
        number = tl.interleave(number & 15, number >> 4)
    wide = number.to(tl.float32).reshape(COLUMNS, UNITS, UNIT)
    group, inside = unit // GROUP, known & (unit < stored * PACKED)
    if HAS_ZERO:
        wide -= tl.load(zero + group, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    elif PACKED == 2:
        wide -= 8.0
    if SCALED:
        wide *= tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    return wide.reshape(COLUMNS, BLOCK * PACKED)


@triton.jit
def _dequantize(
    weight,
    scale,
    zero,
    out,
    stored,
    columns,
    WEIGHT_ROW,
    GROUP,
    GROUPS,
    HAS_ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``GROUP``: elements of one, ``UNIT`` a part of it."""
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[:, None]
    start = tl.program_id(0) * BLOCK
    element = (start * PACKED + tl.arange(0, BLOCK * PACKED))[None, :]
    result = dequantized_tile(
        weight + column * WEIGHT_ROW, scale + column * GROUPS, zero + column * GROUPS, column < columns, start, stored,
        GROUP, HAS_ZERO, True, PACKED, UNIT, COLUMNS, BLOCK,
    ).to(out.dtype.element_ty)  # fmt: skip
    tl.store(out + column * (stored * PACKED) + element, result, mask=(column < columns) & (element < stored * PACKED))


_launch_row = Launcher(_row)
_launch_rows = Launcher(_rows)
_launch_dequantize = Launcher(_dequantize)


def divisor(number: int) -> int:
    """The largest power of two that divides a number."""
    return number & -number


def dequantized(weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The weight ``[columns, inner]`` in the dtype of its scales."""
    columns, stored = weight.shape
    packed = 2 if weight.dtype is torch.uint8 else 1
    out = torch.empty((columns, stored * packed), dtype=scale.dtype, device=weight.device)
    at_once, block, warps = DEQUANTIZED
    scale, group = scale.contiguous(), stored * packed // scale.shape[1]
    _launch_dequantize(
        (-(-stored // block), -(-columns // at_once), 1),
        (weight, scale, scale if zero is None else zero.contiguous(), out),
        (
            stored, columns, weight.stride(0), group, scale.shape[1], zero is not None, packed,
            min(UNIT, divisor(group)), at_once, block,
        ),
        warps=warps,
    )  # fmt: skip
    return out


def supports(x: Tensor, weight: Tensor, *others: object) -> bool | str:
    """Weights of a type that compiles."""
    return compiles(weight.dtype, weight.device)


def weight_only_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.weight_only_linear`. Many rows meet a weight rounded to their dtype."""
    columns, stored = weight.shape
    if x.dtype is torch.float64:
        raise NotSupported("float64")
    if any(each is not None and each.numel() and each.stride(-1) != 1 for each in (x, weight, bias)):
        raise NotSupported("elements of a row, of a column or of the bias that do not lie side by side")
    out = x.new_empty((*x.shape[:-1], columns))
    if not out.numel():
        return out
    rows = x.reshape(-1, x.shape[-1])
    count, groups, packed = rows.shape[0], scale.shape[1], 2 if weight.dtype is torch.uint8 else 1
    scale = scale.contiguous()
    tensors = (
        rows, weight, scale, scale if zero is None else zero.contiguous(), out if bias is None else bias, out,
    )  # fmt: skip
    if count == 1:
        at_once, block = ROW_COLUMNS if columns >= ROW_COLUMNS * ENOUGH else 1, min(ROW_STORED, power_of_two(stored))
        group = stored * packed // groups
        unit = min(UNIT, divisor(group), block * packed)
        _launch_row(
            (-(-columns // at_once), 1, 1),
            tensors,
            (
                stored, columns, weight.stride(0), group, groups, zero is not None, bias is not None, packed, unit,
                block, at_once,
            ),
        )  # fmt: skip
        return out
    group = stored // groups
    together = min(STORED, divisor(group))
    wide = -(-columns // WIDE[0]) >= processors(x.device)
    if count > SOME_ROWS * (4 if wide else 1) or together < FEW_ROWS or x.dtype not in HALF_TYPES:
        return torch.nn.functional.linear(x, dequantized(weight, scale, zero).to(x.dtype), bias)
    tall = max(FEW_ROWS, power_of_two(count))
    at_once, warps, stages = WIDE if wide else NARROW
    _launch_rows(
        (-(-columns // at_once), 1, 1),
        tensors,
        (
            stored, columns, rows.stride(0), weight.stride(0), group, groups, zero is not None, bias is not None,
            packed, tall, at_once, together,
        ),
        sizes=(count,),
        warps=warps,
        stages=stages_that_fit(x.device, together * (at_once + tall * packed * x.element_size()), stages),
    )  # fmt: skip
    return out
