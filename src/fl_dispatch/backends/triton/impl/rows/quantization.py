"""Quantized rows: a program reads some whole rows, or some groups of rows, once and writes them once.

PyTorch computes a scale for the whole tensor before the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import INTERPRETED, Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.quantization import LARGEST, LEAST_SCALE, TENSOR, groups

from ..launch import compiles, power_of_two, row_warps

WIDEST = 32768
"""Most elements of a row or group that a program can hold."""
TILE = 2048
"""Fewest elements of a program, which takes several rows or groups if they are short."""
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding a small number to it rounds the number to an integer, ties to even."""
BY_BITS = tl.constexpr(INTERPRETED)
"""Whether to round to fp8 by bit operations: the interpreter's cast loses a carry, so that 127 becomes 64."""
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
"""Mask of a float32 without its sign. As integers these bits have the numbers' order, with NaN as the largest."""
NORMAL = tl.constexpr(121 << 23)
"""Smallest normal number of fp8, in bits of a float32."""
SHIFT = tl.constexpr(141 << 23)
"""Number with the smallest fp8 number as its unit in the last place, in bits of a float32."""
NONE = tl.constexpr(0x43F00000)
"""Smallest number out of fp8's range, in bits of a float32."""


@triton.jit
def unit_of(number, LARGEST: tl.constexpr, LEAST: tl.constexpr, AXIS: tl.constexpr):
    """Return the scale of the numbers along an axis, float32; NaN if any of them is NaN."""
    bits = tl.max(number.to(tl.int32, bitcast=True) & MAGNITUDE, axis=AXIS, keep_dims=True)
    largest = bits.to(tl.float32, bitcast=True)
    return tl.maximum(largest / LARGEST, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quotient_of(number, unit, LARGEST: tl.constexpr, INTEGERS: tl.constexpr):
    """Divide numbers by their scale and clamp them to the type's range; for integers, round, and replace NaN by 0."""
    quotient = tl.clamp(number / unit, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if INTEGERS:
        quotient = (quotient + ROUND) - ROUND
        if BY_BITS:  # on devices the conversion to an integer makes 0 of NaN
            quotient = tl.where(tl.abs(quotient) <= LARGEST, quotient, 0.0)
    return quotient


@triton.jit
def narrowed(number, TYPE: tl.constexpr):
    """Convert numbers within a type's range to that type, rounded to the nearest; fp8 keeps NaN."""
    if BY_BITS and tl.float8e4nv == TYPE:
        bits = number.to(tl.float32).to(tl.int32, bitcast=True)
        sign, bits = (bits >> 24) & 0x80, bits & MAGNITUDE
        small = bits.to(tl.float32, bitcast=True) + tl.full([1], 16384.0, tl.float32)  # rounds to fp8's least unit
        few = small.to(tl.int32, bitcast=True) - SHIFT
        even = (bits >> 20) & 1
        many = (bits - (120 << 23) + 0x7FFFF + even) >> 20
        found = tl.where(bits >= NONE, 0x7F, tl.where(bits < NORMAL, few, many)) | sign
        return found.to(tl.uint8).to(TYPE, bitcast=True)
    else:
        return number.to(TYPE)


@triton.jit
def store_groups(
    number,
    part,
    parts,
    target,
    inside,
    given,
    out,
    scales,
    GIVEN: tl.constexpr,
    INTEGERS: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Quantize groups ``part``, ``[TOGETHER, 1]``, of numbers ``[TOGETHER, BLOCK]``, and write them.

    ``target``: addresses of the numbers in the result; ``given``: addresses of given scales.
    """
    if GIVEN:
        unit = tl.load(given, mask=part < parts, other=1.0)
    else:
        unit = unit_of(number, LARGEST, LEAST, 1)
    tl.store(scales + part, unit, mask=part < parts)
    quotient = quotient_of(number, unit, LARGEST, INTEGERS)
    tl.store(out + target, narrowed(quotient, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    x,
    scale,
    out,
    scales,
    rows,
    X_ROW,
    INNER,
    GROUP,
    GROUPS: tl.constexpr,
    GIVEN: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    REPEAT: tl.constexpr,
    INTEGERS: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``rows``: number of groups, of which a program takes ``TOGETHER``, each padded to ``BLOCK`` elements.

    A row of ``x`` makes ``REPEAT`` rows of the result, with given scales ``SCALE_ROW`` apart.
    """
    part = (tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)).to(tl.int64)[:, None]
    row, group = part // GROUPS, part % GROUPS
    place = group * GROUP + tl.arange(0, BLOCK)[None, :]
    inside = (part < rows) & (tl.arange(0, BLOCK)[None, :] < GROUP) & (place < INNER)
    number = tl.load(x + row // REPEAT * X_ROW + place, mask=inside, other=0.0).to(tl.float32)
    target, given = row * INNER + place, scale + row * SCALE_ROW
    store_groups(number, part, rows, target, inside, given, out, scales, GIVEN, INTEGERS, LARGEST, LEAST)


_launch = Launcher(_quantize)


def supports(x: Tensor, dtype: str, *others: object) -> bool | str:
    """Check that the type is known and compiles."""
    return compiles(getattr(torch, dtype), x.device) if dtype in LARGEST else f"quantization to {dtype}"


def refuse_long(inner: int, group_size: int) -> int:
    """Return the number of elements that share a scale; raise :class:`NotSupported` if a program cannot hold them."""
    group = group_size if group_size > 0 else inner
    if group > WIDEST:
        raise NotSupported(f"{group} elements with one scale; a program holds at most {WIDEST}")
    return group


def quantize(x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.quantization.quantize`."""
    if x.dtype is torch.float64:
        raise NotSupported("float64")
    inner = x.shape[-1]
    count, group = groups(inner, group_size), refuse_long(inner, group_size)
    if x.numel() and group_size == TENSOR and scale is None:
        scale = (x.abs().amax().float() / LARGEST[dtype]).clamp(min=LEAST_SCALE)
    out, scales = quantized_rows(x.reshape(x.shape[:-1].numel(), inner), dtype, group, scale)
    return out.view(x.shape), scales.view(*x.shape[:-1], count)


def quantized_rows(
    rows: Tensor, dtype: str, group: int, scale: Tensor | None = None, repeat: int = 1
) -> tuple[Tensor, Tensor]:
    """Return quantized rows and the scales of their groups, float32.

    Args:
        rows: ``[rows, inner]``.
        dtype: as in ``quantize``.
        group: elements that share a scale.
        scale: one for all rows, or ``[rows * repeat]``; float32.
        repeat: rows of the result for each input row.
    """
    count, inner = rows.shape
    made, parts = count * repeat, groups(inner, group)
    out = torch.empty((made, inner), dtype=getattr(torch, dtype), device=rows.device)
    scales = torch.empty((made, parts), dtype=torch.float32, device=rows.device)
    if not out.numel():
        return out, scales
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    block, each = power_of_two(group), int(scale is not None and scale.numel() > 1)
    together = max(1, TILE // block)
    _launch(
        (-(-made * parts // together), 1, 1),
        (rows, scales if scale is None else scale, out, scales),
        (
            rows.stride(0), inner, group, parts, scale is not None, each, repeat, dtype == "int8",
            LARGEST[dtype], LEAST_SCALE, together, block,
        ),
        sizes=(made * parts,),
        warps=row_warps(block),
    )  # fmt: skip
    return out, scales
