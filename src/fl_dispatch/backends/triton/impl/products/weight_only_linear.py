"""Products of unquantized rows with weights of 4 or 8 bits, in three forms.

Weights are read in their stored form. One row: a program multiplies few columns element by element. Some rows: numbers
become a half type in registers, and matrix units multiply them, with the columns as the long side of a tile; the two
numbers of a byte belong to an even and an odd element, which are multiplied separately. Many rows: each call
dequantizes the weight once, and PyTorch multiplies; reading and writing the weight is then a small part of the time.

4-bit numbers are read as *words*, int32 with eight numbers each, if the columns are aligned to 4 bytes, otherwise as
bytes. Numbers in words need no conversion instruction: their bits become the low bits of a large float with neighbours
1 apart, and the large float is then subtracted. The large float is an argument, because ptxas would reload a constant
for each use. The codes of e2m1 become the bits of a float with another exponent bias, and multiplying by a power of
two corrects the bias exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.declaration import HALF_TYPES
from fl_dispatch.ops.quantization import FP4, packs_two

from ..launch import capability, compiles, power_of_two, processors, stages_that_fit

FEW_ROWS = 16
"""Fewest rows, and stored elements, of a product on matrix units."""
SOME_ROWS = 16
"""Most rows for matrix units with numbers from registers; four times as many if a weight has many columns."""
ROW_COLUMNS = 4
"""Columns of a program with one row if that makes ``ENOUGH`` programs; else one column."""
ENOUGH = 1024
"""Fewest programs for which each takes ``ROW_COLUMNS`` columns of one row."""
ROW_STORED = 1024
"""Bytes of a column that a program with one row multiplies at a time: 8 for each thread."""
UNIT = 32
"""Elements that are multiplied before the scale is applied: a thread's load, unless groups are shorter."""
STORED = 128
"""Bytes of a column that are multiplied at a time with some rows, unless groups are shorter."""
NARROW = (32, 2, 8)
"""Columns, warps and stages for some rows if wide tiles would leave processors idle."""
WIDE = (64, 4, 4)
"""Columns, warps and stages for some rows otherwise."""
DEQUANTIZED = (16, 256, 4)
"""Columns, bytes and warps of a program that dequantizes."""
WORD_ENOUGH = 512
"""Fewest programs for which each takes all columns of ``WORD_ROW``."""
WORD_ROW = (8, 256, 4)
"""Columns, words of a column at a time, and warps with one row; fewer columns for fewer than ``WORD_ENOUGH`` programs.

The threads load their parts of a row once for all columns.
"""
WORD_UNIT = 4
"""Words that are multiplied before the scale is applied: a thread's load, unless groups are shorter."""
SLICED_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16,)
"""Dtypes of one row on matrix units, with warps that share columns.

In float16, sums with a base of 1,024 may lose more than a result's rounding, if ``x`` has one sign.
"""
SLICED_CAPABILITY = (8, 0)
"""Least compute capability for that: the first with matrix units for bfloat16."""
SLICED_FROM = 1 << 20
"""Fewest words of a weight for that."""
SLICED_COLUMNS = 16
"""Columns of such a program."""
SLICED_WARPS = (4, 16)
"""Fewest and most warps of such a program."""
SLICED_ENOUGH = 3072
"""Fewest warps of all programs; a program has more until there are as many."""
SLICED_WORDS = 16
"""Words of a column that a warp multiplies at a time."""
SLICED_AHEAD = 4
"""Most steps of a warp without a load of the next step's words ahead."""
WORD_FROM = 2
"""Fewest rows for matrix units with words."""
WORD_FEWEST = 8
"""Fewest rows of a tile with words."""
WORD_TILES = {8: (64, 4, 4, 3), 32: (128, 4, 3, 3), 64: (128, 8, 3, 2)}
"""Most rows for matrix units with words → columns, warps, stages, and programs wanted for each processor."""
WORD_STEPS = 4
"""Fewest loads of a piece, if columns are cut into pieces to get enough programs."""
MOST_PIECES = 8
SUMMED = 1024
"""Elements of a program that sums pieces."""
SINGLE_BASE = 0x4B000000
"""Bits of 2^23, the float32 number with a unit of 1."""
HALF_BASES = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}
"""Bits of two numbers, 128 or 1024, with a unit of 1 in a half type."""


@triton.jit
def _float4(codes):
    """Return the e2m1 numbers in the low four bits of codes, as float32."""
    bits = (codes & 7) << 22 | (codes & 8) << 28
    return bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0  # 2^126


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
    FLOAT4: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``stored``: bytes of a column; ``PACKED``: numbers in a byte; ``GROUP``: elements that share a scale.

    A thread sums ``UNIT`` products, a divisor of ``GROUP``, before it applies a scale. ``FLOAT4``: numbers are e2m1.
    """
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
        if FLOAT4:
            number = _float4(number.to(tl.int32))
        part = tl.sum(number.to(tl.float32).reshape(COLUMNS, UNITS, UNIT) * a[None, :, :], axis=2)
        inside = (start * PACKED + unit * UNIT < stored * PACKED)[None, :]
        group = ((start * PACKED + unit * UNIT) // GROUP)[None, :]
        if HAS_ZERO:
            offset = tl.load(zero + there * GROUPS + group, mask=inside, other=0.0).to(tl.float32)
            part -= offset * tl.sum(a, axis=1)[None, :]
        elif PACKED == 2 and not FLOAT4:
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
    FLOAT4: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STORED: tl.constexpr,
):
    """Multiply ``STORED`` bytes of a column at a time, a divisor of a group's ``GROUP`` bytes."""
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
            if FLOAT4:
                low, high = _float4(number.to(tl.int32)).to(a.dtype), _float4((number >> 4).to(tl.int32)).to(a.dtype)
            else:
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
def _digit(words, BASE, offset, SHIFT: tl.constexpr, PLACE: tl.constexpr):
    """Return ``16**PLACE`` times the 4-bit number at ``PLACE`` of ``words >> SHIFT``, less ``offset``, in float32."""
    number = (((words >> SHIFT) & (15 << (4 * PLACE))) | BASE).to(tl.float32, bitcast=True)
    return number - (8388608.0 + offset * 16**PLACE)


@triton.jit(do_not_specialize=["BASE"])
def _word_row(
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    BASE,
    words,
    columns,
    WEIGHT_ROW,
    GROUPS,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FLOAT4: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``words``: int32 of a column, 8 numbers each; ``GROUP``: words that share a scale, ``UNIT`` a divisor of it.

    A thread has contiguous words with all eight numbers of each. ``x`` is divided by the factor ``16**PLACE`` of the
    weight's numbers.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = tl.minimum(column, columns - 1).to(tl.int64)[:, None]
    UNITS: tl.constexpr = BLOCK // UNIT
    word, element, unit = tl.arange(0, BLOCK), tl.arange(0, BLOCK * 8), tl.arange(0, UNITS)
    acc = tl.zeros([COLUMNS, UNITS], dtype=tl.float32)
    for start in range(0, words, BLOCK):
        packed = tl.load(
            weight + there * WEIGHT_ROW + (start + word)[None, :],
            mask=(start + word < words)[None, :],
            other=0,
            eviction_policy="evict_first",
        )
        inside = (start + unit * UNIT < words)[None, :]
        group = ((start + unit * UNIT) // GROUP)[None, :]
        factor = tl.load(scale + there * GROUPS + group, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(x + start * 8 + element, mask=start * 8 + element < words * 8, other=0.0)
        even, odd = a.reshape(BLOCK, 2, 2, 2).split()
        x04, x26 = even.split()
        x15, x37 = odd.split()
        x0, x4 = x04.split()
        x1, x5 = x15.split()
        x2, x6 = x26.split()
        x3, x7 = x37.split()
        elements = (x0, x1, x2, x3, x4, x5, x6, x7)
        part = tl.zeros([COLUMNS, BLOCK], dtype=tl.float32)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for j in tl.static_range(8):
            one = elements[j].to(tl.float32)
            if FLOAT4:
                part += _float4(packed >> 4 * j) * one[None, :]
            else:
                number = _digit(packed, BASE, 0 if HAS_ZERO else 8, 0 if j < 5 else 16, j if j < 5 else j - 4)
                part += number * (one * 0.0625 ** (j if j < 5 else j - 4))[None, :]
            if HAS_ZERO:
                total += one
        part = tl.sum(part.reshape(COLUMNS, UNITS, UNIT), axis=2)
        if HAS_ZERO:
            offset = tl.load(zero + there * GROUPS + group, mask=inside, other=0.0).to(tl.float32)
            part -= offset * tl.sum(total.reshape(UNITS, UNIT), axis=1)[None, :]
        acc += part * factor
    y = tl.sum(acc, axis=1)
    if HAS_BIAS:
        y += tl.load(bias + tl.minimum(column, columns - 1)).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """View int32 as pairs of a half type on a new axis, the low half first; a thread's registers stay as they are."""
    low, high = pairs.to(tl.uint16).to(dtype, bitcast=True), (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _pairs(words, BASE):
    """Return pairs of a word's numbers, added to ``BASE``, on two new axes: 0 and 4, 1 and 5; 2 and 6, 3 and 7."""
    first, second = words & 0x000F000F | BASE, words >> 4 & 0x000F000F | BASE
    third, fourth = words >> 8 & 0x000F000F | BASE, words >> 12 & 0x000F000F | BASE
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _float4_pairs(pairs, dtype: tl.constexpr):
    """Convert pairs of e2m1 codes, in the low bits of an int32's halves, to bits of a half type, up to a factor."""
    if dtype == tl.bfloat16:
        magnitudes = (pairs & 0x00070007) << 6
    else:
        magnitudes = (pairs & 0x00070007) << 9
    return magnitudes | (pairs & 0x00080008) << 12


@triton.jit(do_not_specialize=["rows", "BASE"])
def _word_rows(
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    rows,
    BASE,
    words,
    columns,
    X_ROW,
    WEIGHT_ROW,
    GROUPS,
    PIECE,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FLOAT4: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Multiply ``WORDS`` words of a column at a time, a divisor of a group's ``GROUP``; a program has ``PIECE`` words.

    Products take columns and elements in the order of the loads, so that numbers stay in a thread's registers.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    UNSCALED: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    FLOAT4_UNIT: tl.constexpr = 85070591730234615865843651857942052864.0 if dtype == tl.bfloat16 else 16384.0
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, known = tl.minimum(column, columns - 1).to(tl.int64), row < rows
    word, element = tl.arange(0, WORDS), tl.arange(0, WORDS * 8)
    left = weight + there[:, None] * WEIGHT_ROW + word[None, :]
    right = x + row.to(tl.int64)[:, None] * X_ROW + element[None, :]
    first = tl.program_id(1) * PIECE
    BANDS: tl.constexpr = COLUMNS // (16 * WARPS)
    column = tl.permute(column.reshape(BANDS, 2, WARPS, 8), (0, 2, 1, 3)).reshape(COLUMNS)
    placed = tl.minimum(column, columns - 1).to(tl.int64)
    acc = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in range(first, tl.minimum(first + PIECE, words), WORDS):
        packed = tl.load(left + start, eviction_policy="evict_first")
        a = tl.load(right + start * 8, mask=known[:, None], other=0.0)
        group = start // GROUP
        factor = tl.load(scale + placed * GROUPS + group).to(tl.float32)
        if FLOAT4:
            number = _halves(_float4_pairs(_pairs(packed, 0), dtype), dtype).reshape(COLUMNS, WORDS * 8)
            number *= tl.full([1, 1], FLOAT4_UNIT, dtype=dtype)
        else:
            number = _halves(_pairs(packed, BASE), dtype).reshape(COLUMNS, WORDS * 8)
            if HAS_ZERO:
                offset = (tl.load(zero + there * GROUPS + group).to(tl.float32) + UNSCALED).to(dtype)
                number -= offset[:, None]
            else:
                number -= tl.full([1, 1], UNSCALED + 8, dtype=dtype)
        number = tl.permute(number.reshape(BANDS, 2, WARPS, 8, WORDS // 4, 16, 2), (0, 2, 1, 3, 5, 4, 6))
        a = tl.permute(a.reshape(ROWS, WORDS // 4, 4, 2, 4), (0, 2, 4, 1, 3)).reshape(ROWS, WORDS * 8)
        acc += tl.dot(number.reshape(COLUMNS, WORDS * 8), tl.trans(a)) * factor[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + placed).to(tl.float32)[:, None]
    target = (tl.program_id(1) * rows + row).to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=known[None, :] & (column[:, None] < columns))


@triton.jit(do_not_specialize=["BASE"])
def _sliced_row(
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    BASE,
    SLICE,
    columns,
    WEIGHT_ROW,
    GROUPS,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Multiply one row on matrix units; each warp has ``SLICE`` words of each column, ``WORDS`` at a time.

    A group's ``GROUP`` words are a multiple of ``WORDS``. All eight rows of a product are ``x``, so nothing is masked,
    and an eighth of their sum is exact. Numbers stay added to ``BASE``, and the sum of ``x`` is subtracted as often.
    Columns and elements have the order of the loads, so numbers stay in a thread's registers.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    UNSCALED: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    TILES: tl.constexpr = COLUMNS // 8
    first = tl.program_id(0) * COLUMNS
    tile, warp = tl.arange(0, TILES)[:, None, None, None], tl.arange(0, WARPS)[None, :, None, None]
    within, word = tl.arange(0, 8)[None, None, :, None], tl.arange(0, WORDS)[None, None, None, :]
    there = tl.minimum(first + tile * 8 + within, columns - 1).to(tl.int64)
    left = weight + there * WEIGHT_ROW + warp * SLICE + word
    band, element = tl.arange(0, WARPS)[:, None], tl.arange(0, WORDS * 8)[None, :]
    right = x + band * SLICE * 8 + element
    column = first + tl.arange(0, COLUMNS)
    placed = tl.minimum(column, columns - 1)
    units = placed[None, :].to(tl.int64) * GROUPS
    acc = tl.zeros([WARPS, COLUMNS, 8], dtype=tl.float32)
    if AHEAD:
        coming = tl.load(left, eviction_policy="evict_first")
    for start in range(0, SLICE, WORDS):
        if AHEAD:
            packed, following = coming, word < SLICE - start - WORDS
            coming = tl.load(left + start + WORDS, mask=following, other=0, eviction_policy="evict_first")
        else:
            packed = tl.load(left + start, eviction_policy="evict_first")
        a = tl.load(right + start * 8)
        group = (band * SLICE + start) // GROUP
        factor = tl.load(scale + units + group).to(tl.float32)
        number = _halves(_pairs(packed, BASE), dtype)
        number = tl.permute(number.reshape(TILES, WARPS, 8, 4, WORDS // 4, 2, 2, 2), (1, 0, 2, 4, 5, 3, 6, 7))
        b = tl.permute(a.reshape(WARPS, 4, WORDS // 4, 2, 2, 2), (0, 2, 4, 1, 5, 3)).reshape(WARPS, WORDS * 8)
        b = b[:, :, None].broadcast_to(WARPS, WORDS * 8, 8)
        part = tl.dot(number.reshape(WARPS, COLUMNS, WORDS * 8), b)
        if HAS_ZERO:
            offset = tl.load(zero + units + group).to(tl.float32) + UNSCALED
            part -= (offset * tl.sum(a.to(tl.float32), axis=1)[:, None])[:, :, None]
        else:
            part -= (tl.sum(a.to(tl.float32), axis=1)[:, None] * (UNSCALED + 8))[:, :, None]
        acc += part * factor[:, :, None]
    y = tl.sum(tl.sum(acc, axis=2) * 0.125, axis=0)
    if HAS_BIAS:
        y += tl.load(bias + placed).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["rows"])
def _add(pieces, bias, out, rows, columns, PIECES: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Add ``[PIECES, rows, columns]`` in order."""
    column, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    known, place = column < columns, row.to(tl.int64) * columns + column
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for piece in tl.static_range(PIECES):
        acc += tl.load(pieces + piece * rows.to(tl.int64) * columns + place, mask=known, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=known)


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
    FLOAT4: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return ``[COLUMNS, BLOCK * PACKED]`` in float32: ``BLOCK`` of a column's ``stored`` bytes, from ``start`` on.

    Args:
        weight, scale, zero: pointers to the beginning of each column, ``[COLUMNS, 1]``.
        known: whether each column exists, ``[COLUMNS, 1]``.
        GROUP: elements that share a scale; ``UNIT``: elements with one load of a scale, a divisor of ``GROUP``.
        SCALED: whether the scale is applied here, not by the caller.
    """
    UNITS: tl.constexpr = BLOCK * PACKED // UNIT
    byte = (start + tl.arange(0, BLOCK))[None, :]
    unit = (start * PACKED + tl.arange(0, UNITS) * UNIT)[None, :]
    number = tl.load(weight + byte, mask=known & (byte < stored), other=0.0)
    if PACKED == 2:
        number = tl.interleave(number & 15, number >> 4)
    if FLOAT4:
        number = _float4(number.to(tl.int32))
    wide = number.to(tl.float32).reshape(COLUMNS, UNITS, UNIT)
    group, inside = unit // GROUP, known & (unit < stored * PACKED)
    if HAS_ZERO:
        wide -= tl.load(zero + group, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    elif PACKED == 2 and not FLOAT4:
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
    FLOAT4: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: tiles of ``BLOCK`` bytes of a column, tiles of columns. See :func:`dequantized_tile`."""
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[:, None]
    start = tl.program_id(0) * BLOCK
    element = (start * PACKED + tl.arange(0, BLOCK * PACKED))[None, :]
    result = dequantized_tile(
        weight + column * WEIGHT_ROW, scale + column * GROUPS, zero + column * GROUPS, column < columns, start, stored,
        GROUP, HAS_ZERO, True, PACKED, FLOAT4, UNIT, COLUMNS, BLOCK,
    ).to(out.dtype.element_ty)  # fmt: skip
    tl.store(out + column * (stored * PACKED) + element, result, mask=(column < columns) & (element < stored * PACKED))


_launch_row = Launcher(_row)
_launch_rows = Launcher(_rows)
_launch_word_row = Launcher(_word_row)
_launch_sliced_row = Launcher(_sliced_row)
_launch_word_rows = Launcher(_word_rows)
_launch_add = Launcher(_add)
_launch_dequantize = Launcher(_dequantize)


def divisor(number: int) -> int:
    """Return the largest power of two that divides a number."""
    return number & -number


def stored_numbers(weight: Tensor) -> tuple[int, bool, Tensor]:
    """Return the numbers in an element of a weight, whether they are e2m1, and the weight as kernels read it."""
    float4 = weight.dtype is FP4
    return 2 if packs_two(weight) else 1, float4, weight.view(torch.uint8) if float4 else weight


def dequantized(weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return the weight ``[columns, inner]`` in the dtype of its scales."""
    columns, stored = weight.shape
    packed, float4, weight = stored_numbers(weight)
    out = torch.empty((columns, stored * packed), dtype=scale.dtype, device=weight.device)
    at_once, block, warps = DEQUANTIZED
    scale, group = scale.contiguous(), stored * packed // scale.shape[1]
    _launch_dequantize(
        (-(-stored // block), -(-columns // at_once), 1),
        (weight, scale, scale if zero is None else zero.contiguous(), out),
        (
            stored, columns, weight.stride(0), group, scale.shape[1], zero is not None, packed, float4,
            min(UNIT, divisor(group)), at_once, block,
        ),
        warps=warps,
    )  # fmt: skip
    return out


def _words(weight: Tensor) -> Tensor | None:
    """View a weight as words of four bytes, or return ``None`` if its dtype or alignment forbids it."""
    places = weight.shape[1], weight.stride(0), weight.storage_offset(), weight.data_ptr()
    aligned = all(place % 4 == 0 for place in places)
    return weight.view(torch.int32) if weight.dtype is torch.uint8 and aligned else None


def _row_of_words(tensors: tuple[Tensor, ...], flags: tuple[bool, bool, bool], group: int) -> None:
    """Multiply one row; ``group`` words share a scale."""
    _, weight, scale = tensors[:3]
    columns, words = weight.shape
    at_once, block, warps = WORD_ROW
    while at_once > 1 and columns < at_once * WORD_ENOUGH:
        at_once //= 2
    block = min(block, power_of_two(words))
    _launch_word_row(
        (-(-columns // at_once), 1, 1),
        tensors,
        (
            words, columns, weight.stride(0), scale.shape[1], group, *flags, min(WORD_UNIT, divisor(group), block),
            block, at_once,
        ),
        sizes=(SINGLE_BASE,),
        warps=warps,
    )  # fmt: skip


def _sharing_warps(x: Tensor, words: Tensor, groups: int) -> int:
    """Return the warps that share a column on matrix units, 0 for a row that :func:`_word_row` multiplies.

    Only NVIDIA's matrix units are known to take eight rows.
    """
    (columns, length), (fewest, most), able = words.shape, SLICED_WARPS, capability(x.device)
    if x.dtype not in SLICED_DTYPES or able is None or able < SLICED_CAPABILITY or columns * length < SLICED_FROM:
        return 0
    programs, warps = -(-columns // SLICED_COLUMNS), fewest
    while warps < most and programs * warps < SLICED_ENOUGH:
        warps *= 2
    return 0 if length % (SLICED_WORDS * warps) or length // groups % SLICED_WORDS else warps


def _row_in_slices(tensors: tuple[Tensor, ...], flags: tuple[bool, bool], group: int, warps: int) -> None:
    """Multiply one row of a half type; ``group`` words share a scale, and ``warps`` share a column."""
    rows, weight, scale = tensors[:3]
    columns, words = weight.shape
    _launch_sliced_row(
        (-(-columns // SLICED_COLUMNS), 1, 1),
        tensors,
        (
            words // warps, columns, weight.stride(0), scale.shape[1], group, *flags, SLICED_COLUMNS, SLICED_WORDS,
            warps, words > SLICED_AHEAD * SLICED_WORDS * warps,
        ),
        sizes=(HALF_BASES[rows.dtype],),
        warps=warps,
        stages=1,
    )  # fmt: skip


def _rows_of_words(tensors: tuple[Tensor, ...], flags: tuple[bool, bool, bool], group: int, together: int) -> None:
    """Multiply some rows of a half type, ``together`` words at a time."""
    rows, weight, scale, zero, bias, out = tensors
    (count, (columns, words)), device = (rows.shape[0], weight.shape), rows.device
    has_zero, has_bias, float4 = flags
    tall = max(WORD_FEWEST, power_of_two(count))
    at_once, warps, stages, wanted = next(tile for most, tile in WORD_TILES.items() if count <= most)
    programs, steps = -(-columns // at_once), words // together
    pieces = max(1, min(wanted * processors(device) // programs, steps // WORD_STEPS, MOST_PIECES))
    piece = -(-steps // pieces) * together
    pieces = -(-words // piece)
    parts = out if pieces == 1 else torch.empty((pieces, count, columns), dtype=torch.float32, device=device)
    _launch_word_rows(
        (programs, pieces, 1),
        (rows, weight, scale, zero, bias, parts),
        (
            words, columns, rows.stride(0), weight.stride(0), scale.shape[1], piece, group, has_zero,
            has_bias and pieces == 1, float4, tall, at_once, together, min(warps, at_once // 16),
        ),
        sizes=(count, HALF_BASES[rows.dtype]),
        warps=warps,
        stages=stages_that_fit(device, together * (4 * at_once + 16 * tall * (stages + 1) // stages), stages),
    )  # fmt: skip
    if pieces > 1:
        grid = -(-columns // SUMMED), count, 1
        _launch_add(grid, (parts, bias, out), (columns, pieces, has_bias, SUMMED), sizes=(count,))


def supports(x: Tensor, weight: Tensor, *others: object) -> bool | str:
    """Check that the weights' type compiles."""
    return weight.dtype is FP4 or compiles(weight.dtype, weight.device)


def weight_only_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.weight_only_linear`. Many rows use a weight rounded to their dtype."""
    columns, stored = weight.shape
    if x.dtype is torch.float64:
        raise NotSupported("float64")
    if any(each is not None and each.numel() and each.stride(-1) != 1 for each in (x, weight, bias)):
        raise NotSupported("elements of a row, of a column or of the bias that do not lie side by side")
    out = x.new_empty((*x.shape[:-1], columns))
    if not out.numel():
        return out
    rows, given = x.reshape(-1, x.shape[-1]), weight
    packed, float4, weight = stored_numbers(weight)
    count, groups = rows.shape[0], scale.shape[1]
    scale = scale.contiguous()
    tensors = (
        rows, weight, scale, scale if zero is None else zero.contiguous(), out if bias is None else bias, out,
    )  # fmt: skip
    flags, words = (zero is not None, bias is not None, float4), None if stored // groups % 4 else _words(weight)
    if count == 1 and words is not None and (WORD_FROM > 1 or x.dtype not in HALF_TYPES):
        group, warps = words.shape[1] // groups, 0 if float4 else _sharing_warps(x, words, groups)
        if warps:
            _row_in_slices((rows, words, *tensors[2:]), flags[:2], group, warps)
        else:
            _row_of_words((rows, words, *tensors[2:]), flags, group)
        return out
    if count == 1 and words is None:
        at_once, block = ROW_COLUMNS if columns >= ROW_COLUMNS * ENOUGH else 1, min(ROW_STORED, power_of_two(stored))
        group = stored * packed // groups
        unit = min(UNIT, divisor(group), block * packed)
        _launch_row(
            (-(-columns // at_once), 1, 1),
            tensors,
            (
                stored, columns, weight.stride(0), group, groups, *flags[:2], packed, float4, unit, block, at_once,
            ),
        )  # fmt: skip
        return out
    group = stored // groups
    together = min(STORED, divisor(group))
    if words is not None and count <= max(WORD_TILES) and together >= FEW_ROWS and x.dtype in HALF_TYPES:
        _rows_of_words((rows, words, *tensors[2:]), flags, group // 4, together // 4)
        return out
    wide = -(-columns // WIDE[0]) >= processors(x.device)
    if count > SOME_ROWS * (4 if wide else 1) or together < FEW_ROWS or x.dtype not in HALF_TYPES:
        return torch.nn.functional.linear(x, dequantized(given, scale, zero).to(x.dtype), bias)
    tall = max(FEW_ROWS, power_of_two(count))
    at_once, warps, stages = WIDE if wide else NARROW
    _launch_rows(
        (-(-columns // at_once), 1, 1),
        tensors,
        (
            stored, columns, rows.stride(0), weight.stride(0), group, groups, *flags[:2], packed, float4, tall, at_once,
            together,
        ),
        sizes=(count,),
        warps=warps,
        stages=stages_that_fit(x.device, together * (at_once + tall * packed * x.element_size()), stages),
    )  # fmt: skip
    return out
