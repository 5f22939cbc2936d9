"""Quantized results of a norm and of a gated activation: a program holds whole rows, so that only they are written.

Rows that no program holds, and scales that depend on more than a row, take the two kernels one after the other. The
results are the same, bit by bit in Triton's interpreter; on a GPU the compiler may add a row up in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.quantization import LARGEST, LEAST_SCALE, TENSOR, groups

from . import activation, normalization, quantize
from .launch import Launcher, power_of_two, row_warps


@triton.jit
def _store(
    y,
    row,
    columns,
    rows,
    scale,
    out,
    scales,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    GIVEN: tl.constexpr,
    INTEGERS: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantize the program's rows ``[ROWS, BLOCK]``, zeros beyond their width, and write them with their scales.

    ``GROUP`` elements have a scale in common, and lie in ``SPAN``, a power of two: the same, or all of a row.
    """
    number = y.to(tl.float32)
    if GIVEN:
        unit = tl.load(scale + row * 0, mask=row < rows, other=1.0)
        tl.store(scales + row, unit, mask=row < rows)
        quotient = quantize.quotient_of(number, unit, LARGEST, INTEGERS)
    elif SPAN == BLOCK:
        unit = quantize.unit_of(number, LARGEST, LEAST, 1)
        tl.store(scales + row, unit, mask=row < rows)
        quotient = quantize.quotient_of(number, unit, LARGEST, INTEGERS)
    else:
        groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        parts = tl.reshape(number, (ROWS, BLOCK // SPAN, SPAN))
        unit = quantize.unit_of(parts, LARGEST, LEAST, 2)
        place = tl.arange(0, BLOCK // SPAN)[None, :]
        units = tl.reshape(unit, (ROWS, BLOCK // SPAN))
        tl.store(scales + row * groups + place, units, mask=(row < rows) & (place < groups))
        quotient = tl.reshape(quantize.quotient_of(parts, unit, LARGEST, INTEGERS), (ROWS, BLOCK))
    # A thread writes as many numbers as it reads at once: more bytes of fewer threads would spread the rows otherwise
    # than the norm's own kernel has them, whose sums are taken in that order.
    at_once: tl.constexpr = 128 // y.dtype.primitive_bitwidth
    place = tl.max_contiguous(row * WIDTH + columns, [1, at_once])
    tl.store(out + place, quotient.to(out.dtype.element_ty), mask=(row < rows) & (columns < WIDTH))


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,
    residual,
    weight,
    total_out,
    scale,
    out,
    scales,
    rows,
    X_ROW,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    GIVEN: tl.constexpr,
    INTEGERS: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EPSILON: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (columns < WIDTH)
    source, target = row * X_ROW + columns, row * WIDTH + columns
    y = normalization.normalized(
        x, residual, weight, total_out, rows, source, target, columns, inside, WIDTH, EPSILON, HAS_RESIDUAL,
        HAS_WEIGHT, False,
    )  # fmt: skip
    _store(y, row, columns, rows, scale, out, scales, WIDTH, GROUP, SPAN, GIVEN, INTEGERS, LARGEST, LEAST, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _gated(
    x,
    scale,
    out,
    scales,
    rows,
    X_ROW,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    GIVEN: tl.constexpr,
    INTEGERS: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (columns < WIDTH)
    start = x + row * X_ROW + columns
    gate = tl.load(start, mask=inside, other=0.0)
    up = tl.load(start + WIDTH, mask=inside, other=0.0)
    y = activation.gated(gate, up, "silu")
    _store(y, row, columns, rows, scale, out, scales, WIDTH, GROUP, SPAN, GIVEN, INTEGERS, LARGEST, LEAST, ROWS, BLOCK)


_launch_norm = Launcher(_norm)
_launch_gated = Launcher(_gated)


def supports(x: Tensor, dtype: str, *others: object) -> bool | str:
    """As ``quantize``."""
    return quantize.supports(x, dtype)


def _holds(width: int, group_size: int, scale: Tensor | None) -> bool:
    """Whether programs hold all that a scale depends on, and find groups in their rows."""
    grouped = group_size <= 0 or group_size == power_of_two(group_size) or group_size >= width
    return width <= quantize.WIDEST and grouped and (group_size != TENSOR or scale is not None)


class _Result:
    """Memory for the result of rows ``[rows, width]``, and how a program finds their groups."""

    def __init__(self, like: Tensor, width: int, dtype: str, group_size: int, scale: Tensor | None) -> None:
        *leading, _ = like.shape
        self.out = like.new_empty((*leading, width), dtype=getattr(torch, dtype))
        self.scales = like.new_empty((*leading, groups(width, group_size)), dtype=torch.float32)
        self.tensors = (self.scales if scale is None else scale, self.out, self.scales)
        self.block = block = power_of_two(width)
        self.together = max(1, quantize.TILE // block)
        whole = group_size <= 0 or group_size >= width
        group, span = (width, block) if whole else (group_size, group_size)
        self.numbers = (
            width, group, span, scale is not None, dtype == "int8", LARGEST[dtype], LEAST_SCALE, self.together, block,
        )  # fmt: skip

    def grid(self, rows: int) -> tuple[int, int, int]:
        return -(-rows // self.together), 1, 1


def rms_norm_quantize(
    x: Tensor,
    dtype: str,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    epsilon: float = 1e-6,
    group_size: int = 0,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See :data:`fl_dispatch.ops.joined.rms_norm_quantize`. A contiguous residual is overwritten."""
    if x.dtype is torch.float64:
        raise NotSupported("float64")
    hidden = x.shape[-1]
    if not _holds(hidden, group_size, scale):
        quantize.refuse_long(hidden, group_size)  # before the norm writes its sum
        normalized = normalization.rms_norm(x.clone() if residual is not None else x, residual, weight, epsilon)
        if isinstance(normalized, Tensor):
            return quantize.quantize(normalized, dtype, group_size, scale)
        return normalized[1], *quantize.quantize(normalized[0], dtype, group_size, scale)
    result = _Result(x, hidden, dtype, group_size, scale)
    rows = _rows(x)
    total = rows
    if residual is not None:
        total = residual if residual.is_contiguous() else residual.contiguous()
    if rows.numel():
        if weight is not None and weight.stride(0) != 1:
            weight = weight.contiguous()
        _launch_norm(
            result.grid(rows.shape[0]),
            (rows, total, rows if weight is None else weight, total, *result.tensors),
            (rows.stride(0), *result.numbers, epsilon, residual is not None, weight is not None),
            sizes=(rows.shape[0],),
            warps=row_warps(result.block),
        )
    return (result.out, result.scales) if residual is None else (total, result.out, result.scales)


def silu_and_mul_quantize(
    x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.joined.silu_and_mul_quantize`."""
    if x.dtype is torch.float64:
        raise NotSupported("float64")
    width = x.shape[-1] // 2
    if not _holds(width, group_size, scale):
        return quantize.quantize(activation.silu_and_mul(x), dtype, group_size, scale)
    result = _Result(x, width, dtype, group_size, scale)
    rows = _rows(x)
    if rows.numel():
        _launch_gated(
            result.grid(rows.shape[0]),
            (rows, *result.tensors),
            (rows.stride(0), *result.numbers),
            sizes=(rows.shape[0],),
            warps=row_warps(result.block),
        )
    return result.out, result.scales


def _rows(x: Tensor) -> Tensor:
    """``[rows, elements]``, each row's elements side by side."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
