"""Quantization, and products with quantized weights.

Each operator takes its weights in one order; the loader of a checkpoint in another order reorders them once.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from .declaration import SEVERAL_ROUNDINGS, Mode, Sample, Tolerance, Work, Workload, operator, row_terms
from .inputs import quantized, shapes
from .linear import products

OPAQUE = frozenset({Mode.OPAQUE, Mode.EAGER})
FP8 = torch.float8_e4m3fn
FP4 = torch.float4_e2m1fn_x2
"""Two e2m1 numbers per byte, the first in the low half; PyTorch moves such bytes, and has no arithmetic for them."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of e2m1 by the lower three bits of a code; the fourth is the sign (OCP Microscaling Formats 1.0)."""
LARGEST = MappingProxyType({"int8": 127.0, "float8_e4m3fn": 448.0})
"""The quantized types, and the quantized magnitude of a group's largest element."""
LEAST_SCALE = 1e-10
"""The smallest scale, also the scale of a group of zeros."""
TENSOR = -1
"""``group_size`` for one scale of the whole tensor."""
ROW = 0
"""``group_size`` for one scale per row."""
EXACT = MappingProxyType(
    dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), Tolerance(1e-6, 1e-14))
)


def groups(inner: int, group_size: int) -> int:
    """Return the number of groups in a row."""
    return -(-inner // group_size) if group_size > 0 else 1


# -- quantization -----------------------------------------------------------------------------------------------------


def _quantize_fake(x: Tensor, dtype: str, group_size: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    scales = x.new_empty((*x.shape[:-1], groups(x.shape[-1], group_size)), dtype=wide)
    return x.new_empty(x.shape, dtype=getattr(torch, dtype)), scales


def _quantize_work(x: Tensor, group_size: int) -> Work:
    scales = x.shape[:-1].numel() * groups(x.shape[-1], group_size)
    return Work(x.numel() * (x.element_size() + 1) + 4 * scales, 3 * x.numel())


def _quantize_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    for name, largest in LARGEST.items():
        source = quantized.TieFree(dtype, device, generator, getattr(torch, name), largest)

        def sample(label: str, x: Tensor, *rest: object, serving: bool = True, name: str = name) -> Sample:
            return Sample(f"{name}, {label}", (x, name, *rest), serving)

        yield sample("decode, 32 tokens", source.rows(32, 1024))
        yield sample("prefill, 200 tokens", source.rows(200, 512))
        yield sample("one token", source.rows(1, 4096))
        yield sample("groups of 128", source.rows(17, 512, group=128), 128)
        yield sample("one scale for all rows", source.rows(9, 256, group=TENSOR), TENSOR)
        given = torch.tensor([0.03], dtype=torch.promote_types(dtype, torch.float32), device=device)
        yield sample("a scale that is given, too small for some", source.with_scale(8, 256, 0.03), TENSOR, given)
        yield sample("a short last group", source.rows(3, 200, group=128), 128, serving=False)
        yield sample("odd width", source.rows(3, 67), serving=False)
        yield sample("3-d", source.rows(6, 64).view(2, 3, 64), serving=False)
        yield sample("row stride larger than the row", source.apart(4, 96, 64), serving=False)
        yield sample("rows of zeros", torch.zeros(3, 64, dtype=dtype, device=device), serving=False)
        x = source.rows(5, 256, group=128)
        yield sample("NaN and infinities", quantized.none_and_infinite(x, 128), 128, serving=False)
        yield sample("NaN and infinities, a scale a row", quantized.none_and_infinite(x[:, :128], 128), serving=False)
        x = quantized.none_and_infinite(source.with_scale(5, 128, 0.03), 64)
        yield sample("NaN and infinities, a scale that is given", x, TENSOR, given, serving=False)
        yield sample("small numbers", source.rows(4, 64, scale=2.0**-14), serving=False)
        yield sample("empty batch", source.rows(0, 64), serving=False)


@operator(
    modes=OPAQUE,
    fake=_quantize_fake,
    samples=_quantize_samples,
    tolerances=EXACT,
    aliases=("dynamic_quant", "scaled_int8_quant", "scaled_fp8_quant", "per_token_quant", "per_token_group_quant"),
    work=_quantize_work,
)
def quantize(x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Symmetric quantization with a scale for each row, each group of a row, or all rows.

    ``q = round(x / scale)``, ties to even, clamped to the type's range. ``scale`` is the largest magnitude divided by
    127 (int8) or 448 (float8_e4m3fn), and at least 1e-10. ``q * scale`` is near ``x``.

    A NaN, or an infinity without a given scale, makes the fp8 ``q`` NaN there, and a computed scale NaN or infinite.
    int8 has no NaN, so ``q`` is 0 there; with a given scale the NaN is lost.

    Args:
        x: ``[..., inner]``, floating point.
        dtype: ``"int8"`` or ``"float8_e4m3fn"``.
        group_size: elements of a row that share a scale; the last group may be shorter. 0 for the whole row, -1 for all
            rows.
        scale: ``[1]``, float32: a given scale (static quantization), or ``None``. Only with ``group_size`` -1.

    Returns:
        ``q``, shape of ``x``, contiguous; and the scales, ``[..., groups]``, float32 (float64 for such an ``x``), at
        least one for each row.
    """
    if dtype not in LARGEST:
        raise NotImplementedError(f"quantization to {dtype}")
    largest, inner = LARGEST[dtype], x.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = groups(inner, group_size)
    if scale is not None:
        scales = scale.to(wide.dtype).expand(*x.shape[:-1], 1).contiguous()
    elif group_size < 0:
        all_rows = wide.abs().amax() if x.numel() else wide.new_zeros(())
        scales = (all_rows / largest).clamp(min=LEAST_SCALE).expand(*x.shape[:-1], 1).contiguous()
    else:
        width = group_size or inner
        grouped = functional.pad(wide, (0, count * width - inner)).reshape(*x.shape[:-1], count, width)
        scales = (grouped.abs().amax(-1) / largest).clamp(min=LEAST_SCALE)
    quotient = (wide / _spread(scales, inner, group_size)).clamp(-largest, largest)
    if dtype == "int8":
        quotient = quotient.round().nan_to_num(nan=0.0)  # a cast leaves this to the processor
    return quotient.to(getattr(torch, dtype)).contiguous(), scales


def _spread(scales: Tensor, inner: int, group_size: int) -> Tensor:
    """Expand scales of groups to one for each element of the last dimension."""
    return scales.repeat_interleave(group_size, -1)[..., :inner] if group_size > 0 else scales


# -- both sides quantized ---------------------------------------------------------------------------------------------


def _result_dtype(scale: Tensor, dtype: str) -> torch.dtype:
    return torch.float64 if scale.dtype is torch.float64 else getattr(torch, dtype)


def _scaled_fake(x: Tensor, x_scale: Tensor, weight: Tensor, dtype: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=_result_dtype(x_scale, dtype))


def _scaled_workload(x: Tensor, x_scale: Tensor, dtype: str) -> Workload:
    return Workload(_result_dtype(x_scale, dtype), x.shape[:-1].numel())


def _scaled_work(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Work:
    rows = x.shape[:-1].numel()
    read = x.numel() + weight.numel() + 4 * (x_scale.numel() + weight_scale.numel())
    return Work(read + 2 * rows * weight.shape[0], 2 * rows * weight.numel())


def _scaled_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    name = str(dtype).removeprefix("torch.")
    for kind in (torch.int8, FP8):
        source = quantized.Products(dtype, device, generator, kind)
        label = str(kind).removeprefix("torch.")
        for rows, columns, inner in ((1, 512, 1024), (32, 256, 512), (40, 768, 256), (100, 384, 256)):
            args = source.both(rows, columns, inner)
            yield Sample(f"{label}, {rows} of {inner} to {columns}", (*args, None, name))
        yield Sample(f"{label}, one row, bias", (*source.both(1, 48, 256), source.normal(48), name))
        yield Sample(f"{label}, bias", (*source.both(7, 384, 512), source.normal(384), name))
        args = source.both(5, 96, 64, one_scale=True)
        yield Sample(f"{label}, one scale for the weight", (*args, None, name), serving=False)
        yield Sample(f"{label}, odd sizes", (*source.both(3, 77, 131), source.normal(77), name), serving=False)
        x, x_scale, *weight = source.both(6, 32, 64)
        yield Sample(f"{label}, 3-d", (x.view(2, 3, 64), x_scale.view(2, 3, 1), *weight, None, name), serving=False)
        yield Sample(f"{label}, empty batch", (*source.both(0, 32, 64), None, name), serving=False)
    source = quantized.Products(dtype, device, generator, FP8)
    for rows, columns, inner in ((1, 512, 1024), (33, 256, 512), (100, 256, 384)):
        args = source.blocks(rows, columns, inner, 128)
        yield Sample(f"blocks of 128, {rows} of {inner} to {columns}", (*args, None, name, 128))
    args = source.blocks(1, 40, 328, 128)
    yield Sample("blocks of 128, one row", (*args, source.normal(40), name, 128), serving=False)
    args = source.blocks(3, 200, 328, 128)
    yield Sample("blocks of 128, short last ones", (*args, source.normal(200), name, 128), serving=False)


def _fp8_terms(x: Tensor) -> int:
    return x.shape[-1] if x.dtype is FP8 else 0


@operator(
    weights=("weight", "weight_scale"),
    modes=OPAQUE,
    fake=_scaled_fake,
    samples=_scaled_samples,
    shapes=shapes.quantized_products,
    aliases=("scaled_mm", "quant_matmul", "w8a8_linear", "block_scaled_mm"),
    terms=row_terms,
    narrow_terms=_fp8_terms,
    workload=_scaled_workload,
    work=_scaled_work,
)
def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> Tensor:
    """A product of quantized rows with quantized weights: ``y = (x * x_scale) @ (weight * weight_scale).T + bias``.

    Products are summed in int32 or float32, fp8 products also in the accumulator format of matrix units, and the result
    is rounded once.

    Args:
        x: ``[..., inner]``, int8 or float8_e4m3fn.
        x_scale: ``[..., 1]``, float32: a scale per row; ``[..., ceil(inner / block_size)]`` with blocks.
        weight: ``[columns, inner]``, dtype of ``x``.
        weight_scale: ``[columns, 1]`` or ``[1, 1]``, float32; with blocks ``[ceil(columns / block_size), ceil(inner /
            block_size)]``.
        bias: ``[columns]``, floating point, or ``None``.
        dtype: the result's dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        block_size: rows and columns of a weight's block that share a scale, and elements of a row of ``x`` that do; 0
            for no blocks.

    Returns:
        ``[..., columns]``, of ``dtype``, or float64 if ``x_scale`` is.
    """
    wide, inner = x_scale.dtype, x.shape[-1]
    if block_size:
        columns = weight_scale.repeat_interleave(block_size, 0)[: weight.shape[0]]
        product = functional.linear(
            x.to(wide) * _spread(x_scale, inner, block_size), weight.to(wide) * _spread(columns, inner, block_size)
        )
    else:  # scales of rows and columns stay outside the sum, which is exact for integers
        product = functional.linear(x.to(wide), weight.to(wide)) * x_scale * weight_scale.flatten()
    if bias is not None:
        product = product + bias.to(wide)
    return product if wide is torch.float64 else product.to(getattr(torch, dtype))


# -- weights alone quantized ------------------------------------------------------------------------------------------


def _weight_only_work(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Work:
    rows, columns = x.shape[:-1].numel(), weight.shape[0]
    elements = rows * (x.shape[-1] + columns) + scale.numel()
    zeros = 0 if zero is None else zero.numel()
    return Work(elements * x.element_size() + weight.numel() + zeros, 2 * rows * columns * x.shape[-1])


def _weight_only_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    source = quantized.Products(dtype, device, generator, torch.int8)

    def sample(label: str, rows: int, columns: int, inner: int, *rest: int, serving: bool = True) -> Sample:
        bits, group, *zeros = rest
        weight = source.weight(columns, inner, bits, group, bool(zeros))
        return Sample(label, (source.normal(rows, inner), *weight), serving)

    for bits in (4, 8):
        for rows, columns, inner in ((1, 256, 1024), (32, 128, 512), (80, 96, 256)):
            yield sample(f"{bits} bits, {rows} of {inner} to {columns}, groups of 128", rows, columns, inner, bits, 128)
        yield sample(f"{bits} bits, zero points, groups of 32", 5, 192, 256, bits, 32, True)
        yield sample(f"{bits} bits, one row, zero points, groups of 32", 1, 40, 256, bits, 32, True)
        yield sample(f"{bits} bits, one scale a column", 4, 128, 320, bits, 320)
        yield sample(f"{bits} bits, small groups, odd columns", 3, 37, 48, bits, 16, True, serving=False)
        yield sample(f"{bits} bits, empty batch", 0, 32, 64, bits, 64, serving=False)
    for rows, columns, inner in ((1, 256, 1024), (6, 192, 256), (80, 96, 256)):
        float4 = source.float4(columns, inner, 32)
        yield Sample(f"float4, {rows} of {inner} to {columns}, groups of 32", (source.normal(rows, inner), *float4))
    float4 = source.float4(37, 48, 16)
    yield Sample("float4, groups of 16, odd columns", (source.normal(3, 48), *float4), serving=False)
    yield Sample("float4, groups of 16, one row", (source.normal(1, 48), *float4), serving=False)
    floats = quantized.Products(dtype, device, generator, FP8)
    yield Sample("float8, one scale a column", (source.normal(3, 256), *floats.weight(128, 256, 8, 256)))
    for rows, columns, inner in ((1, 256, 1024), (6, 192, 256), (80, 96, 256)):
        float8 = floats.weight(columns, inner, 8, 32)
        yield Sample(f"float8, {rows} of {inner} to {columns}, groups of 32", (source.normal(rows, inner), *float8))
    weight = source.weight(64, 128, 4, 64, True)
    yield Sample("3-d, bias", (source.normal(2, 3, 128), *weight, source.normal(64)), serving=False)


@operator(
    weights=("weight", "scale", "zero"),
    modes=OPAQUE,
    fake=products,
    samples=_weight_only_samples,
    shapes=shapes.packed_products,
    mean_error=SEVERAL_ROUNDINGS,  # kernels for many rows round each dequantized weight to the half type
    aliases=("wna16_linear", "w4a16", "w8a16", "awq_gemm", "gptq_gemm", "weight_quant_batchmatmul"),
    terms=row_terms,
    work=_weight_only_work,
)
def weight_only_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """A product with weights of 4 or 8 bits: ``y = x @ ((weight - zero) * scale).T + bias``.

    Args:
        x: ``[..., inner]``, floating point.
        weight: ``[columns, inner / 2]``, uint8: numbers from 0 to 15, two per byte, the first in the low half; or
            float4_e2m1fn_x2, in the same order; or ``[columns, inner]``, int8 or float8_e4m3fn.
        scale: ``[columns, groups]``, dtype of ``x``; a group has ``inner / groups`` elements.
        zero: ``[columns, groups]``, int8, or ``None`` for 8 with 4-bit integers, and for 0 otherwise.
        bias: ``[columns]``, dtype of ``x``, or ``None``.

    Returns:
        ``[..., columns]``, dtype of ``x``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    numbers = unpacked(weight).to(wide).reshape(*scale.shape, -1)
    if zero is not None:
        numbers = numbers - zero.to(wide)[..., None]
    elif weight.dtype is torch.uint8:
        numbers = numbers - 8
    dequantized = (numbers * scale.to(wide)[..., None]).flatten(1)
    return functional.linear(x.to(wide), dequantized, None if bias is None else bias.to(wide)).to(x.dtype)


def packs_two(weight: Tensor) -> bool:
    """Whether a byte of a weight has two numbers."""
    return weight.dtype in (torch.uint8, FP4)


def unpacked(weight: Tensor) -> Tensor:
    """Return 4-bit numbers one per element: uint8, or float32 of float4_e2m1fn_x2; return other weights unchanged."""
    if not packs_two(weight):
        return weight
    stored = weight.view(torch.uint8)
    codes = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)
    if weight.dtype is not FP4:
        return codes
    signed = torch.tensor(E2M1 + tuple(-number for number in E2M1), device=weight.device)
    return signed[codes.long()]


# -- rows as quantization leaves them ---------------------------------------------------------------------------------

_EXPONENT = 0x7F800000
"""The bits of float32's exponent."""
_QUARTER = 1 << 21
"""A quarter of the step from a power of two to the next, in float32's bits."""
_LEAST = 2.0**-126
"""The smallest scale of a group, also the scale of zeros."""
ROUNDINGS = MappingProxyType({"int8": 0, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16})
"""Formats to which rows are rounded → elements that share a scale; 0 for a row."""


def rounded(x: Tensor, numbers: str, factor: Tensor | None = None) -> Tensor:
    """Return rows rounded as by quantization, for devices or weights without products of the quantized format.

    A float is multiplied by a scale of few bits, so that every half type represents the result; an integer's product is
    rounded to the type.

    Args:
        x: ``[..., inner]``, floating point.
        numbers: a name of :data:`ROUNDINGS`. ``"int8"``: see :func:`int8_rows`; ``"mxfp4"`` and ``"mxfp8"``: e2m1 and
            float8_e4m3fn, with a power of two for each group; ``"nvfp4"``: e2m1, with a scale in fp8 for each.
        factor: factor of ``"nvfp4"``: ``[1]`` or ``[rows]``, float32. It multiplies the rows before rounding, and stays
            in the result.
    """
    if numbers == "int8":
        integers, scale = int8_rows(x)
        return (integers * scale).to(x.dtype)
    if numbers not in ROUNDINGS:
        raise NotImplementedError(f"rows rounded to '{numbers}'")
    wide = x.float() if factor is None else x.float() * factor[:, None]
    groups = wide.reshape(*x.shape[:-1], x.shape[-1] // ROUNDINGS[numbers], ROUNDINGS[numbers])
    largest, most = groups.abs().amax(-1, keepdim=True), torch.finfo(FP8).max
    if numbers == "nvfp4":
        scale = (largest / E2M1[-1]).clamp(max=most).to(FP8).float()
        found = _nearest(groups / torch.where(scale > 0, scale, 1.0))
    elif numbers == "mxfp4":
        scale = _power(largest, 4)
        found = _nearest(groups / scale)
    else:
        scale = _power(largest, 256)
        found = (groups / scale).clamp(-most, most).to(FP8).float()
    return (found * scale).view(x.shape).to(x.dtype)


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as 8-bit integers, and a scale for each: its largest magnitude over 127.5, half of int8's range."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).div(127.5)
    return (wide / torch.where(scale > 0, scale, 1.0)).round().clamp(-128, 127), scale


def _nearest(x: Tensor) -> Tensor:
    """Return the nearest e2m1 numbers, ties to even."""
    x = x.clamp(-E2M1[-1], E2M1[-1])
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round() * step


def _power(magnitude: Tensor, largest: int) -> Tensor:
    """Return a power of two for each magnitude, rounded up from 1.75 times on, divided by ``largest``."""
    bits = magnitude.view(torch.int32)
    return ((bits + _QUARTER) & _EXPONENT).view(torch.float32).div(largest).clamp(min=_LEAST)
