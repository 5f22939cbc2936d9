"""Quantized rows by the wheel's kernel, and products with quantized weights by PyTorch's.

4-bit weights are repacked for PyTorch's kernel (:mod:`fl_dispatch.weight_forms`); 8-bit weights already fit.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from fl_dispatch import weight_forms
from fl_dispatch.ops import quantization as declared
from fl_dispatch.ops.quantization import LEAST_SCALE

from .. import library
from .limits import problem

GROUPS = (32, 64, 128, 256)
"""Sizes of groups in the kernel for 4 bits."""
COLUMNS = 32
"""Columns that the kernel takes at a time."""
INT8 = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""x86 instructions for int8 products; without them PyTorch's int8 product is far slower than its float32 product."""

NO_INT8 = "the processor has no instructions for products of int8"


@cache
def multiplies_int8() -> bool:
    """Whether this processor has fast int8 products; other processors than x86 report other flags, or none."""
    flags = library.processor_flags()
    return not flags or bool(INT8 & flags)


def supports_quantize(x: Tensor, dtype: str, group_size: int = 0) -> bool | str:
    """Check for int8 with a scale for each row."""
    if dtype != "int8" or group_size != 0:
        return "the kernel quantizes to int8, with a scale for each row"
    return problem("x", x) or True


def quantize(x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.quantization.quantize`.

    The kernel divides by zero for a row of zeros and drops NaN, so the reference takes such calls.
    """
    out, scales = torch.empty_like(x, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if x.numel():
        rows = x.view(-1, x.shape[-1])
        torch.ops._C.dynamic_scaled_int8_quant(out.view(rows.shape), rows, scales.view(-1, 1), None)
        wide = torch.float32 if x.dtype is torch.float16 else None  # a sum of float16 overflows; others need no copy
        if not math.isfinite(rows.sum(dtype=wide)) or bool((scales < LEAST_SCALE).any()):
            return declared.quantize.reference(x, dtype, group_size, scale)
    return out, scales


def supports_scaled_linear(x: Tensor, x_scale: Tensor, weight: Tensor, block_size: int = 0) -> bool | str:
    """Check for int8 without blocks, on the CPU."""
    if x.dtype is not torch.int8 or weight.dtype is not torch.int8 or block_size:
        return "the kernel multiplies int8, without scales of blocks"
    if x_scale.dtype is not torch.float32:
        return f"x_scale is {x_scale.dtype}, not float32"
    if not multiplies_int8():
        return NO_INT8
    return True if x.is_cpu else f"x is on {x.device}, not on the CPU"


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.scaled_linear`. Sums are exact."""
    sums = torch._int_mm(x.reshape(-1, x.shape[-1]), weight.t())
    product = sums.view(*x.shape[:-1], weight.shape[0]).float().mul_(x_scale).mul_(weight_scale.view(-1))
    if bias is not None:
        product += bias
    return product.to(getattr(torch, dtype))


def supports_weight_only_linear(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> bool | str:
    """Check for bfloat16, with 4 bits in groups or int8 with one scale a column."""
    if not x.is_cpu or x.dtype is not torch.bfloat16 or scale.dtype is not x.dtype:
        return "the kernels are fast in bfloat16 on the CPU only"
    if zero is not None:
        return "the kernel rounds zero points to the type of x"
    columns, groups = scale.shape
    if weight.dtype is torch.uint8:
        if x.shape[-1] // groups not in GROUPS or columns % COLUMNS:
            return f"4 bits in groups of {', '.join(map(str, GROUPS))} and {COLUMNS} columns at a time only"
        return True
    return True if weight.dtype is torch.int8 and groups == 1 else "8 bits as int8 with one scale a column only"


def weight_only_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.weight_only_linear`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # latent rows are slices of wider rows
    out: Tensor
    if weight.dtype is torch.int8:
        out = torch.ops.aten._weight_int8pack_mm(rows, weight, scale.view(-1))
    else:
        packed = weight_forms.of(weight, "vendor.cpu.onednn", _four_bits)
        scales = weight_forms.of(scale, "vendor.cpu.onednn", _pairs)
        if packed is None or scales is None or not x.numel():
            return declared.weight_only_linear.reference(x, weight, scale, zero, bias)
        size = x.shape[-1] // scale.shape[1]
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, size, scales)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


def _four_bits(weight: Tensor, before: Tensor | None) -> Tensor | None:
    """Repack 4-bit numbers for PyTorch's kernel."""
    found: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(declared.unpacked(weight.detach()).int(), 1)
    return found


def _pairs(scale: Tensor, before: Tensor | None) -> Tensor | None:
    """Pair each group's scale with an offset, ``[groups, columns, 2]``; the kernel takes 8 for zero."""
    return torch.stack((scale, torch.zeros_like(scale)), -1).transpose(0, 1).contiguous()
