"""Products of quantized rows with quantized weights, in three forms.

One row: a program multiplies few columns element by element, so each of its threads has loads of 16 bytes in flight
and nothing waits for matrix units. Some rows: matrix units with the columns as the long side of a tile, deeply
pipelined, because reading the weights takes most of the time. Many rows: tiles of many rows and columns, ordered so
that concurrent programs read the same data.

fp8 is summed 128 elements at a time, and these sums in float32, because a Hopper GPU's accumulator for fp8 has 14 bits.
For a result in float32 products run in float16, which holds fp8 exactly. Scales of rows and columns are applied after
the sum, and a block's scale before the block is added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported

from ..launch import compiles, fitting, power_of_two, processors, shared_memory, stages_that_fit
from .prefetch import after, ask

FEW_ROWS = 16
"""Fewest rows of a product on matrix units."""
SOME_ROWS = 64
"""Most rows with the columns as the long side."""
ENOUGH = 512
"""Fewest programs for which each takes several columns of one row."""
UNIT = 16
"""Elements of a column in each thread of such a program."""
SHORT_SUM = 128
"""Most elements that the chip may sum in its own accumulator."""
MOST_PARTS = 4
"""Most blocks that a program with some rows multiplies in a turn."""
LEAST_STAGES = 3
"""Fewest stages: one is multiplied while the others are loaded."""
LEAST_BLOCK = 32
"""Shortest side of a block of fp8."""
NEIGHBOURS = 8
"""Tiles of rows for which concurrent programs share columns."""


class Tile(NamedTuple):
    """The part of a product that a program computes, its warps and its stages."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


class Row(NamedTuple):
    """The part of a product that a program with one row computes, and its warps.

    Args:
        columns: columns of a program if that makes :data:`ENOUGH` programs; else one column.
        inner: the most elements of a column that it multiplies at a time.
        warps: its warps.
    """

    columns: int
    inner: int
    warps: int


ROW = Row(4, 2048, 4)
"""The part for int8, and for fp8 in blocks."""
FP8_ROW = Row(1, 2048, 2)
"""The part for fp8 with a scale for each column."""
NARROW = (32, 512, 4, 4)
"""Columns, elements, warps and stages for some rows."""
MIDDLE = (64, 128, 4, 8)
"""``NARROW`` if these tiles leave at most a third of the multiprocessors idle."""
WIDE = (128, 256, 8, 2)
"""``NARROW`` if each multiprocessor gets a tile and has room for a second one."""
BLOCKS_NARROW = (64, 512, 4, 3)
"""``NARROW`` for weights with blocks: a step covers several blocks and multiplies them one by one."""
BLOCKS_MIDDLE = (64, 256, 4, 4)
"""``MIDDLE`` for weights with blocks."""
BLOCKS_SLIM = (16, 256, 4, 6)
"""``BLOCKS_NARROW`` for 17 to 32 rows if narrow tiles would leave three quarters of the processors idle."""
SLIM_ROWS = 32
"""The most rows for ``BLOCKS_SLIM``."""
ROOM = 2 * (SOME_ROWS + WIDE[0]) * WIDE[1] * WIDE[3]
"""Bytes of shared memory of two wide tiles."""
TILES = (Tile(128, 128, 128, 4, 3), Tile(64, 128, 128, 4, 4), Tile(64, 64, 128, 4, 5))
"""Tiles for many rows: the first one that gives each processor a tile, else the last."""
BLOCKS_TILES = (Tile(128, 64, 128, 4, 4), TILES[-1])
"""``TILES`` for weights with blocks, because their sums need twice the registers: the last one if each program then has
a processor.
"""


@triton.jit
def _row(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    next_weight,
    inner,
    columns,
    WEIGHT_ROW,
    SIZE,
    SLICE,
    FIRST,
    SCALES,
    COLUMN_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCKS: tl.constexpr,
    INTEGERS: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASKS: tl.constexpr,
):
    """``BLOCKS``: side of a block in elements, 0 without blocks; a row has ``SCALES`` blocks.

    A thread sums ``UNIT`` products before it applies a scale. ``SIZE`` to ``FIRST``, ``ASKS``: see :mod:`.prefetch`.
    """
    UNITS: tl.constexpr = INNER // UNIT
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    there = tl.minimum(column, columns - 1)
    element, unit = tl.arange(0, INNER), tl.arange(0, UNITS) * UNIT
    source = weight + there.to(tl.int64)[:, None] * WEIGHT_ROW + element[None, :]
    wide: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    acc = tl.zeros([COLUMNS, UNITS], dtype=wide)
    for start in tl.range(0, inner, INNER, num_stages=1):
        if EVEN:
            a = tl.load(x + start + element)
            b = tl.load(source + start, eviction_policy="evict_first")
        else:
            inside = start + element < inner
            a = tl.load(x + start + element, mask=inside, other=0.0)
            b = tl.load(source + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        part = tl.sum((b.to(wide) * a.to(wide)[None, :]).reshape(COLUMNS, UNITS, UNIT), axis=2)
        if BLOCKS:
            block = (start + unit) // BLOCKS
            inside = start + unit < inner
            factor = tl.load(x_scale + block, mask=inside, other=0.0)
            factor *= tl.load(weight_scale + (first // BLOCKS) * SCALES + block, mask=inside, other=0.0)
            acc += part * factor[None, :]
        else:
            acc += part
    y = tl.sum(acc, axis=1).to(tl.float32)
    if not BLOCKS:
        y = y * tl.load(x_scale) * tl.load(weight_scale + there * COLUMN_SCALE)
    if HAS_BIAS:
        y += tl.load(bias + there).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty), mask=column < columns)
    if ASKS:
        ask(next_weight, SIZE, SLICE, FIRST)


@triton.jit
def _sum(b, a, acc, INTEGERS: tl.constexpr, EXACT: tl.constexpr, SHORT: tl.constexpr):
    """``acc + b @ a``."""
    if INTEGERS:
        acc = tl.dot(b, a, acc, out_dtype=tl.int32)
    elif EXACT:
        acc = tl.dot(b.to(tl.float16), a.to(tl.float16), acc)
    else:
        acc = tl.dot(b, a, acc, max_num_imprecise_acc=SHORT)
    return acc


@triton.jit(do_not_specialize=["rows"])
def _rows(
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
    EXACT: tl.constexpr,
    SHORT: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """At most ``ROWS`` rows, ``PARTS`` times ``INNER`` elements at a time; see :func:`_row`."""
    row = tl.arange(0, ROWS)
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    there, known = tl.minimum(column, columns - 1).to(tl.int64), row < rows
    element = tl.arange(0, INNER)
    left = weight + there[:, None] * WEIGHT_ROW + element[None, :]
    right = x + row.to(tl.int64)[None, :] * X_ROW + element[:, None]
    acc = tl.zeros([COLUMNS, ROWS], dtype=tl.int32 if INTEGERS else tl.float32)
    for start in tl.range(0, inner, INNER * PARTS, num_stages=STAGES):
        for part in tl.static_range(PARTS):
            place = start + part * INNER
            if EVEN:
                b = tl.load(left + place, eviction_policy="evict_first")
                a = tl.load(right + place, mask=known[None, :], other=0.0)
            else:
                inside = place + element < inner
                b = tl.load(left + place, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
                a = tl.load(right + place, mask=inside[:, None] & known[None, :], other=0.0)
            if BLOCKS:
                block = place // BLOCKS + row * 0  # for each row, because the compiler loads no scalar ahead
                scaled = known & (block < SCALES)
                factor = tl.load(x_scale + row * SCALES + block, mask=scaled, other=0.0)
                factor *= tl.load(weight_scale + (first // BLOCKS) * SCALES + block, mask=scaled, other=0.0)
                zero = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
                acc += _sum(b, a, zero, INTEGERS, EXACT, SHORT) * factor[None, :]
            else:
                acc = _sum(b, a, acc, INTEGERS, EXACT, SHORT)
    y = acc.to(tl.float32)
    if not BLOCKS:
        factor = tl.load(x_scale + row, mask=known, other=0.0)
        y = y * tl.load(weight_scale + there * COLUMN_SCALE)[:, None] * factor[None, :]
    if HAS_BIAS:
        y += tl.load(bias + there).to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(target, y.to(out.dtype.element_ty), mask=known[None, :] & (column[:, None] < columns))


@triton.jit
def scaled_tile(
    left,
    right,
    left_scales,
    right_scales,
    left_known,
    right_known,
    inner,
    BLOCKS: tl.constexpr,
    INTEGERS: tl.constexpr,
    EXACT: tl.constexpr,
    SHORT: tl.constexpr,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """``[ROWS, COLUMNS]`` in float32: quantized rows times columns of a weight, scaled.

    Args:
        left, right: where rows begin, ``[ROWS, 1]``, and columns, ``[1, COLUMNS]``.
        left_scales, right_scales: where their scales begin, ``[ROWS]`` and ``[COLUMNS]``.
        left_known, right_known: whether each row and column exists, ``[ROWS, 1]`` and ``[1, COLUMNS]``. For the others
            only scales are read, because programs that all read one substitute row would wait for each other.
        AHEAD: stages by which scales are loaded ahead too, where the rows are a weight's; or ``None``.
    """
    POLICY: tl.constexpr = "" if AHEAD is None else "evict_first"
    element = tl.arange(0, INNER)
    left, right = left + element[None, :], right + element[:, None]
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.int32 if INTEGERS else tl.float32)
    for start in tl.range(0, inner, INNER, num_stages=AHEAD):
        if EVEN:
            a = tl.load(left + start, mask=left_known, other=0.0, eviction_policy=POLICY)
            b = tl.load(right + start, mask=right_known, other=0.0)
        else:
            inside = start + element < inner
            a = tl.load(left + start, mask=left_known & inside[None, :], other=0.0, eviction_policy=POLICY)
            b = tl.load(right + start, mask=right_known & inside[:, None], other=0.0)
        if BLOCKS:
            part = start // BLOCKS
            factor = tl.load(left_scales + part)[:, None] * tl.load(right_scales + part)[None, :]
            zero = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
            acc += _sum(a, b, zero, INTEGERS, EXACT, SHORT) * factor
        else:
            acc = _sum(a, b, acc, INTEGERS, EXACT, SHORT)
    y = acc.to(tl.float32)
    if not BLOCKS:
        y = y * tl.load(left_scales)[:, None] * tl.load(right_scales)[None, :]
    return y


@triton.jit
def scaled_product(
    rows,
    columns,
    row_scales,
    column_scales,
    known,
    inner,
    BLOCKS: tl.constexpr,
    INTEGERS: tl.constexpr,
    EXACT: tl.constexpr,
    SHORT: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """As :func:`scaled_tile`, of rows that are ``known``, ``[ROWS]``.

    In blocks the weight is the left side of the product, so that scales are loaded ahead.
    """
    every = tl.full([COLUMNS], True, tl.int1)
    if BLOCKS and not EXACT:
        y = scaled_tile(
            columns[:, None], rows[None, :], column_scales, row_scales, every[:, None], known[None, :], inner, BLOCKS,
            INTEGERS, EXACT, SHORT, EVEN, STAGES, COLUMNS, ROWS, INNER,
        )  # fmt: skip
        y = tl.trans(y)
    else:
        y = scaled_tile(
            rows[:, None], columns[None, :], row_scales, column_scales, known[:, None], every[None, :], inner, BLOCKS,
            INTEGERS, EXACT, SHORT, EVEN, None, ROWS, COLUMNS, INNER,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])
def _tiles(
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
    EXACT: tl.constexpr,
    SHORT: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    STAGES: tl.constexpr,
):
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    above = tl.program_id(0) // (NEIGHBOURS * across) * NEIGHBOURS
    together = tl.minimum(down - above, NEIGHBOURS)
    within = tl.program_id(0) % (NEIGHBOURS * across)
    first = within // together * COLUMNS
    row = (above + within % together) * ROWS + tl.arange(0, ROWS)
    column = first + tl.arange(0, COLUMNS)
    here, there = tl.minimum(row, rows - 1).to(tl.int64), tl.minimum(column, columns - 1).to(tl.int64)
    y = scaled_product(
        x + here * X_ROW, weight + there * WEIGHT_ROW, x_scale + here * SCALES,
        weight_scale + (there // BLOCKS * SCALES if BLOCKS else there * COLUMN_SCALE), row < rows, inner, BLOCKS,
        INTEGERS, EXACT, SHORT, EVEN, STAGES, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias + there).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < columns))


_launch_row = Launcher(_row)
_launch_rows = Launcher(_rows)
_launch_tiles = Launcher(_tiles)


def refused_blocks(side: int, dtype: torch.dtype) -> str:
    """Return why the kernels do not take a weight's blocks, or an empty string."""
    if side and (side < LEAST_BLOCK or side & (side - 1) or dtype is torch.int8):
        return f"blocks of fp8 with a side that is a power of two from {LEAST_BLOCK} on"
    return ""


def _refuse(x: Tensor, x_scale: Tensor, weight: Tensor, bias: Tensor | None, block_size: int) -> None:
    if x.dtype is not weight.dtype or x_scale.dtype is not torch.float32:
        raise NotSupported("rows and weights of one type, and scales of float32")
    if reason := refused_blocks(block_size, x.dtype):
        raise NotSupported(reason)
    if any(each is not None and each.numel() and each.stride(-1) != 1 for each in (x, weight, bias)):
        raise NotSupported("elements of a row, of a column or of the bias that do not lie side by side")


def _tile(rows: int, columns: int, device: torch.device, blocks: int = 0) -> Tile:
    """Choose the tile of a program for a product of more than one row."""
    units = processors(device)
    if rows <= SOME_ROWS:
        narrow, middle = (BLOCKS_NARROW, BLOCKS_MIDDLE) if blocks else (NARROW, MIDDLE)
        chosen = middle if 3 * -(-columns // middle[0]) >= 2 * units else narrow
        if blocks and FEW_ROWS < rows <= SLIM_ROWS and 4 * -(-columns // narrow[0]) < units:
            chosen = BLOCKS_SLIM
        if not blocks and -(-columns // WIDE[0]) >= units and shared_memory(device) >= ROOM:
            chosen = WIDE
        return Tile(max(FEW_ROWS, power_of_two(rows)), *chosen)

    def programs(tile: Tile) -> int:
        return -(-rows // tile.rows) * -(-columns // min(tile.columns, blocks or tile.columns))

    if blocks:
        large, small = BLOCKS_TILES[0], BLOCKS_TILES[-1]
        return small if programs(small) <= units else large
    return next((tile for tile in TILES if programs(tile) >= units), TILES[-1])


def _parts(device: torch.device, stage: int, wanted: int) -> int:
    """Return how many blocks a program multiplies in a turn, so that three stages of ``stage`` bytes a block fit."""
    parts = min(MOST_PARTS, wanted)
    while parts > 1 and stages_that_fit(device, stage * parts, LEAST_STAGES) < LEAST_STAGES:
        parts //= 2
    return parts


def supports(x: Tensor) -> bool | str:
    """Check that the rows' type compiles."""
    return compiles(x.dtype, x.device)


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
    _refuse(x, x_scale, weight, bias, block_size)
    out = x.new_empty((*x.shape[:-1], columns), dtype=getattr(torch, dtype))
    if not out.numel():
        return out
    x = x.reshape(-1, inner)
    rows = x.shape[0]
    tensors = (x, x_scale.contiguous(), weight, weight_scale.contiguous(), out if bias is None else bias, out)
    scales = (x_scale.shape[-1], int(weight_scale.numel() > 1), bias is not None, block_size, x.dtype is torch.int8)
    if rows == 1:
        part = ROW if block_size or x.dtype is torch.int8 else FP8_ROW
        at_once = part.columns if columns >= part.columns * ENOUGH else 1
        block = fitting(inner, part.inner)
        programs = -(-columns // at_once)
        upcoming, where, asks = after(weight, programs)
        numbers: tuple[Any, ...] = (
            inner, columns, weight.stride(0), *where, *scales, inner % block == 0, min(UNIT, block), block, at_once,
            asks,
        )  # fmt: skip
        _launch_row((programs, 1, 1), (*tensors, upcoming), numbers, warps=part.warps)
        return out
    tile = _tile(rows, columns, x.device, block_size)
    at_once = min(tile.inner, block_size or tile.inner)
    wide = min(tile.columns, block_size or tile.columns)
    some, across = rows <= SOME_ROWS, -(-columns // wide)
    stage = (tile.rows + wide) * at_once
    parts = _parts(x.device, stage, tile.inner // at_once) if some else 1
    numbers = (
        inner, columns, x.stride(0), weight.stride(0), *scales, dtype == "float32", min(SHORT_SUM, at_once),
        inner % (at_once * parts) == 0, tile.rows, wide, at_once,
    )  # fmt: skip
    stages = stages_that_fit(x.device, stage * parts, tile.stages)
    (_launch_rows if some else _launch_tiles)(
        (across if some else across * -(-rows // tile.rows), 1, 1),
        tensors,
        (*numbers, *((parts, stages) if some else (NEIGHBOURS, stages))),
        sizes=(rows,),
        warps=tile.warps,
        stages=stages,
    )
    return out
