"""Norms and gated activations that write only their quantized results.

A program holds whole rows of a norm, and whole groups or rows of an activation. If these do not fit, the two separate
kernels run one after the other. Results are equal bit by bit in Triton's interpreter; on a GPU the compiler may sum a
row in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.quantization import LARGEST, LEAST_SCALE, TENSOR, groups

from ..launch import power_of_two, row_warps
from ..rows import activation, normalization, quantization

GATED_TILE = 1024
"""Fewest elements of a program of the activation, which takes several groups if they are short."""


@triton.jit
def _target(y, row, columns, WIDTH: tl.constexpr):
    """Return the result's addresses; a thread writes as many elements as it reads at once.

    Wider stores would change how a row is spread over threads, and so the order of its sums, which the norm's own
    kernel has too.
    """
    at_once: tl.constexpr = 128 // y.dtype.primitive_bitwidth
    return tl.max_contiguous(row * WIDTH + columns, [1, at_once])


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
    number, target = y.to(tl.float32), _target(y, row, columns, WIDTH)
    if SPAN == BLOCK:
        given = scale + row * 0
        quantization.store_groups(
            number, row, rows, target, inside, given, out, scales, GIVEN, INTEGERS, LARGEST, LEAST
        )
    else:
        groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        parts = tl.reshape(number, (ROWS, BLOCK // SPAN, SPAN))
        unit = quantization.unit_of(parts, LARGEST, LEAST, 2)
        place = tl.arange(0, BLOCK // SPAN)[None, :]
        units = tl.reshape(unit, (ROWS, BLOCK // SPAN))
        tl.store(scales + row * groups + place, units, mask=(row < rows) & (place < groups))
        quotient = tl.reshape(quantization.quotient_of(parts, unit, LARGEST, INTEGERS), (ROWS, BLOCK))
        tl.store(out + target, quantization.narrowed(quotient, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["parts"])
def _gated(
    x,
    scale,
    out,
    scales,
    parts,
    X_ROW,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GIVEN: tl.constexpr,
    INTEGERS: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes ``TOGETHER`` of all ``parts``: groups of ``GROUP`` elements, ``GROUPS`` in a row."""
    part = (tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)).to(tl.int64)[:, None]
    row, element = part // GROUPS, tl.arange(0, BLOCK)[None, :]
    columns = part % GROUPS * GROUP + element
    inside = (part < parts) & (element < GROUP) & (columns < WIDTH)
    start = x + row * X_ROW + columns
    gate = tl.load(start, mask=inside, other=0.0)
    up = tl.load(start + WIDTH, mask=inside, other=0.0)
    y = activation.gated(gate, up, "silu")
    number, target, given = y.to(tl.float32), _target(y, row, columns, WIDTH), scale + part * 0
    quantization.store_groups(number, part, parts, target, inside, given, out, scales, GIVEN, INTEGERS, LARGEST, LEAST)


_launch_norm = Launcher(_norm)
_launch_gated = Launcher(_gated)


def supports(x: Tensor, dtype: str, *others: object) -> bool | str:
    """Check the same limits as ``quantize``."""
    return quantization.supports(x, dtype)


def _memory(like: Tensor, width: int, dtype: str, group_size: int) -> tuple[Tensor, Tensor]:
    """Allocate the quantized rows ``[..., width]`` and their scales."""
    *leading, _ = like.shape
    out = like.new_empty((*leading, width), dtype=getattr(torch, dtype))
    return out, like.new_empty((*leading, groups(width, group_size)), dtype=torch.float32)


def rms_norm_quantize(
    x: Tensor,
    dtype: str,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    epsilon: float = 1e-6,
    group_size: int = 0,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See :data:`fl_dispatch.ops.fused.rms_norm_quantize`. A contiguous residual is overwritten."""
    if x.dtype is torch.float64:
        raise NotSupported("float64")
    hidden = x.shape[-1]
    whole = group_size <= 0 or group_size >= hidden
    divided = whole or group_size == power_of_two(group_size)
    if hidden > quantization.WIDEST or not divided or _apart(group_size, scale):
        quantization.refuse_long(hidden, group_size)  # before the norm overwrites the residual
        normalized = normalization.rms_norm(x.clone() if residual is not None else x, residual, weight, epsilon)
        if isinstance(normalized, Tensor):
            return quantization.quantize(normalized, dtype, group_size, scale)
        return normalized[1], *quantization.quantize(normalized[0], dtype, group_size, scale)
    out, scales = _memory(x, hidden, dtype, group_size)
    rows = _rows(x)
    total = rows
    if residual is not None:
        total = residual if residual.is_contiguous() else residual.contiguous()
    if rows.numel():
        if weight is not None and weight.stride(0) != 1:
            weight = weight.contiguous()
        block = power_of_two(hidden)
        together = max(1, quantization.TILE // block)
        group, span = (hidden, block) if whole else (group_size, group_size)
        _launch_norm(
            (-(-rows.shape[0] // together), 1, 1),
            (rows, total, rows if weight is None else weight, total, scales if scale is None else scale, out, scales),
            (
                rows.stride(0), hidden, group, span, scale is not None, dtype == "int8", LARGEST[dtype], LEAST_SCALE,
                together, block, epsilon, residual is not None, weight is not None,
            ),
            sizes=(rows.shape[0],),
            warps=row_warps(block),
        )  # fmt: skip
    return (out, scales) if residual is None else (total, out, scales)


def silu_and_mul_quantize(
    x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.fused.silu_and_mul_quantize`."""
    if x.dtype is torch.float64:
        raise NotSupported("float64")
    width = x.shape[-1] // 2
    group = group_size if 0 < group_size < width else width
    if group > quantization.WIDEST or _apart(group_size, scale):
        return quantization.quantize(activation.silu_and_mul(x), dtype, group_size, scale)
    out, scales = _memory(x, width, dtype, group_size)
    rows, parts = _rows(x), scales.numel()
    if rows.numel():
        block = power_of_two(group)
        together = max(1, GATED_TILE // block)
        _launch_gated(
            (-(-parts // together), 1, 1),
            (rows, scales if scale is None else scale, out, scales),
            (
                rows.stride(0), width, group, scales.shape[-1], scale is not None, dtype == "int8", LARGEST[dtype],
                LEAST_SCALE, together, block,
            ),
            sizes=(parts,),
            warps=row_warps(block),
        )  # fmt: skip
    return out, scales


def _apart(group_size: int, scale: Tensor | None) -> bool:
    """Whether a scale depends on more than one row."""
    return group_size == TENSOR and scale is None


def _rows(x: Tensor) -> Tensor:
    """View or copy ``x`` as ``[rows, elements]`` with contiguous rows."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
