"""Products with the factors of LoRA adapters: tokens are grouped by adapter, and a program takes some tokens of one.

The grid depends only on the numbers of tokens and slots, so a captured graph serves every mapping; programs without
tokens exit immediately. A batch without adapters launches nothing, because the CPU knows that none is active.

A small batch (:data:`FEW`) times a long factor would occupy only a few programs. Such sums are divided into
:func:`_pieces`, which a second kernel adds in order, so results do not vary from run to run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.declaration import HALF_TYPES
from fl_dispatch.ops.lora import FEW, PARTS, given

from ..launch import power_of_two

PIECE = 1024
"""Fewest elements of a piece when a row is divided."""
MOST_PIECES = 8
"""Most pieces of a row."""
LEAST = 16
"""Shortest side of a product on matrix units."""


class Tile(NamedTuple):
    """Tile of a product: rows, columns, length of a step, warps, stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


SHRINK = {True: Tile(16, 16, 128, 4, 4), False: Tile(64, 64, 64, 4, 3)}
EXPAND = {True: Tile(16, 64, 64, 4, 2), False: Tile(64, 128, 64, 4, 2)}
"""Tiles of small batches (True) and of other batches."""
WIDE = Tile(16, 32, 32, 4, 2)
"""The tile for float32, because its products are exact and slow."""


@triton.jit
def _rows(order, starts, slot, block, BLOCK_M: tl.constexpr):
    """Return the places in ``order`` of a block of a slot's tokens, the tokens, and which of them exist."""
    first = tl.load(starts + slot) + block * BLOCK_M
    place = first + tl.arange(0, BLOCK_M)
    there = place < tl.load(starts + slot + 1)
    return place, tl.load(order + place, mask=there, other=0), there


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x,
    down,
    down_2,
    down_3,
    order,
    starts,
    out,
    tokens,
    scale,
    X_ROW,
    INNER: tl.constexpr,
    RANK: tl.constexpr,
    PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: blocks of tokens times pieces, parts times tiles of the rank, slots.

    With several pieces ``out`` has one more dimension in front, and its rows are places in ``order``.
    """
    block, piece, slot = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES, tl.program_id(2)
    if tl.load(starts + slot) + block * BLOCK_M >= tl.load(starts + slot + 1):
        return
    TILES: tl.constexpr = (RANK + BLOCK_N - 1) // BLOCK_N
    part, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    factor = down
    if part == 1:
        factor = down_2
    if part == 2:
        factor = down_3
    place, token, there = _rows(order, starts, slot, block, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    STEPS: tl.constexpr = (INNER + PIECES * BLOCK_K - 1) // (PIECES * BLOCK_K)
    step = piece * STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
    a = x + token.to(tl.int64)[:, None] * X_ROW + step[None, :]
    b = factor + slot.to(tl.int64) * (RANK * INNER) + tl.minimum(column, RANK - 1)[None, :] * INNER + step[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, STEPS * BLOCK_K, BLOCK_K):
        if INNER % (PIECES * BLOCK_K) == 0:
            rows = tl.load(a, mask=there[:, None], other=0.0)
            weights = tl.load(b)
        else:
            inside = step + k < INNER
            rows = tl.load(a, mask=there[:, None] & inside[None, :], other=0.0)
            weights = tl.load(b, mask=inside[:, None], other=0.0)
        acc = tl.dot(rows, weights, acc, input_precision=PRECISION)
        a += BLOCK_K
        b += BLOCK_K
    parts = tl.num_programs(1) // TILES
    row = place if PIECES > 1 else token
    target = (piece * parts + part).to(tl.int64) * tokens + row
    inside = there[:, None] & (column < RANK)[None, :]
    tl.store(out + target[:, None] * RANK + column[None, :], (acc * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _add_pieces(
    pieces,
    order,
    end,
    out,
    tokens,
    RANK: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: blocks of tokens that have an adapter, parts. ``end`` is how many there are."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = place < tl.load(end)
    column = tl.arange(0, BLOCK_N)
    inside = there[:, None] & (column < RANK)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for piece in tl.static_range(PIECES):
        source = (piece * parts + part).to(tl.int64) * tokens + place
        acc += tl.load(pieces + source[:, None] * RANK + column[None, :], mask=inside, other=0.0)
    token = tl.load(order + place, mask=there, other=0)
    target = part.to(tl.int64) * tokens + token
    tl.store(out + target[:, None] * RANK + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _expand(
    products,
    up,
    up_2,
    up_3,
    order,
    starts,
    y,
    tokens,
    Y_ROW,
    OFFSET,
    SLOT,
    SLOT_2,
    SLOT_3,
    WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr,
    WIDTH_3: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: blocks of tokens, tiles of all parts' columns, slots."""
    block, tile, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(starts + slot) + block * BLOCK_M >= tl.load(starts + slot + 1):
        return
    TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    TILES_2: tl.constexpr = (WIDTH_2 + BLOCK_N - 1) // BLOCK_N
    second, third = tile >= TILES, tile >= TILES + TILES_2
    part = second.to(tl.int32) + third.to(tl.int32)
    first = tl.where(third, TILES + TILES_2, tl.where(second, TILES, 0))
    width = tl.where(third, WIDTH_3, tl.where(second, WIDTH_2, WIDTH))
    start = OFFSET + tl.where(third, WIDTH + WIDTH_2, tl.where(second, WIDTH, 0))
    factor = up + slot.to(tl.int64) * SLOT
    if part == 1:
        factor = up_2 + slot.to(tl.int64) * SLOT_2
    if part == 2:
        factor = up_3 + slot.to(tl.int64) * SLOT_3
    _, token, there = _rows(order, starts, slot, block, BLOCK_M)
    column = (tile - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    source = products + (part * tl.cast(tokens, tl.int64) + token)[:, None] * RANK
    weights = factor + tl.minimum(column, width - 1)[None, :] * RANK
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, RANK, BLOCK_K):
        inside = step + k < RANK
        a = tl.load(source + (k + step)[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        b = tl.load(weights + (k + step)[:, None], mask=inside[:, None], other=0.0)
        acc = tl.dot(a.to(up.dtype.element_ty), b, acc, input_precision=PRECISION)
    target = y + token.to(tl.int64)[:, None] * Y_ROW + (start + column)[None, :]
    inside = there[:, None] & (column < width)[None, :]
    old = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (old + acc).to(y.dtype.element_ty), mask=inside)


_launch_shrink = Launcher(_shrink)
_launch_add_pieces = Launcher(_add_pieces)
_launch_expand = Launcher(_expand)


def _pieces(inner: int, few: bool) -> int:
    """Return the number of pieces of a row; few distinct numbers, because each one compiles another kernel."""
    return max(1, min(MOST_PIECES, inner // PIECE)) if few else 1


def _tile(tiles: dict[bool, Tile], few: bool, dtype: torch.dtype) -> tuple[Tile, str]:
    """Return a tile, and the precision of its products."""
    if dtype in HALF_TYPES:
        return tiles[few], "tf32"  # unused: products of half types have a single precision
    if dtype is torch.float32:
        return WIDE, "ieee"
    raise NotSupported(f"no kernel for adapters in {dtype}")


def _dense(factors: list[Tensor], inner: int) -> bool:
    """Whether the rows of each slot are contiguous."""
    return all(factor.stride(2) == 1 and factor.stride(1) == inner for factor in factors)


def lora_shrink(
    x: Tensor,
    out: Tensor,
    down: Tensor,
    adapters: Tensor,
    order: Tensor,
    starts: Tensor,
    active: Tensor,
    scale: float = 1.0,
    down_2: Tensor | None = None,
    down_3: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.lora.lora_shrink`."""
    if not len(x) or active.item() == 0:
        return out
    factors = given(down, down_2, down_3)
    tokens, inner, (slots, rank, _) = len(x), x.shape[1], down.shape
    few = tokens <= FEW
    tile, precision = _tile(SHRINK, few, x.dtype)
    if x.stride(1) != 1 or not out.is_contiguous() or not all(factor.is_contiguous() for factor in factors):
        raise NotSupported("rows or factors are not contiguous")
    if any(factor.dtype is not x.dtype for factor in factors):
        raise NotSupported(f"the factors are not {x.dtype}")
    columns = min(tile.columns, max(LEAST, power_of_two(rank)))
    depth = min(tile.depth, max(LEAST, power_of_two(inner)))
    pieces = _pieces(inner, few)
    target = out if pieces == 1 else out.new_empty((pieces, *out.shape), dtype=torch.float32)
    _launch_shrink(
        (-(-tokens // tile.rows) * pieces, len(factors) * -(-rank // columns), slots),
        (x, *(factors + factors[:1] * PARTS)[:PARTS], order, starts, target),
        (scale, x.stride(0), inner, rank, pieces, precision, tile.rows, columns, depth),
        sizes=(tokens,),
        warps=tile.warps,
        stages=tile.stages,
    )
    if pieces > 1:
        _launch_add_pieces(
            (-(-tokens // tile.rows), len(factors), 1),
            (target, order, starts[slots:], out),
            (rank, pieces, tile.rows, power_of_two(rank)),
            sizes=(tokens,),
        )
    return out


def lora_expand(
    y: Tensor,
    products: Tensor,
    up: Tensor,
    adapters: Tensor,
    order: Tensor,
    starts: Tensor,
    active: Tensor,
    offset: int = 0,
    up_2: Tensor | None = None,
    up_3: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.lora.lora_expand`."""
    if not len(y) or active.item() == 0:
        return y
    factors = given(up, up_2, up_3)
    tokens, rank, slots = len(y), products.shape[2], up.shape[0]
    tile, precision = _tile(EXPAND, tokens <= FEW, up.dtype)
    if y.stride(1) != 1 or not _dense(factors, rank) or any(factor.dtype is not up.dtype for factor in factors):
        raise NotSupported("rows or factors are not contiguous, or differ in their dtype")
    depth = min(tile.depth, max(LEAST, power_of_two(rank)))
    widths = [factor.shape[1] for factor in factors] + [0] * (PARTS - len(factors))
    tiles = sum(-(-width // tile.columns) for width in widths)
    given_thrice = (factors + factors[:1] * PARTS)[:PARTS]
    _launch_expand(
        (-(-tokens // tile.rows), tiles, slots),
        (products.contiguous(), *given_thrice, order, starts, y),
        (
            y.stride(0), offset, *(factor.stride(0) for factor in given_thrice), *widths, rank, precision, tile.rows,
            tile.columns, depth,
        ),
        sizes=(tokens,),
        warps=tile.warps,
        stages=tile.stages,
    )  # fmt: skip
    return y
