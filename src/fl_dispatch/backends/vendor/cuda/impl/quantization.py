"""Quantized rows, and products of them by CUTLASS."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fl_dispatch.ops.quantization import FP8, LARGEST, LEAST_SCALE, groups

from .limits import capability, problem

GROUP = 128
"""Size of the kernels' groups and blocks."""
WHOLE = 16
"""Divisor of a weight's rows and columns."""
FOUR = 4
"""Divisor of the rows of ``x`` for a weight with blocks."""
RESULTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LEAST_SCALE_OF_ROWS = 1 / (448 * 512)
FIRST_INT8 = 75
"""Lowest compute capability with kernels for int8."""
LAST_INT8 = 99
"""Highest compute capability with kernels for int8."""


def supports_quantize(x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None) -> bool | str:
    """Check for fp8 with a given scale or groups of 128, or int8 with a scale for each row."""
    if why := problem("x", x):
        return why
    if dtype == "int8":
        return group_size == 0 or "the kernels cut int8 off where they should round it, but for scales of whole rows"
    if scale is not None:
        return True
    if group_size == 0:
        return f"the kernel gives no row a scale below {LEAST_SCALE_OF_ROWS:.1e}"
    if group_size != GROUP:
        return f"the kernels have groups of {GROUP}, not of {group_size}"
    whole = x.shape[-1] % GROUP == 0
    return whole or f"rows of {x.shape[-1]} elements are no whole number of groups of {GROUP}"


def quantize(x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.quantization.quantize`."""
    inner, largest = x.shape[-1], LARGEST[dtype]
    out = torch.empty_like(x, dtype=getattr(torch, dtype))
    if scale is not None:
        if x.numel():  # a launch without threads raises
            torch.ops._C.static_scaled_fp8_quant(out.view(-1, inner), x.view(-1, inner), scale, None)
        return out, scale.expand(*x.shape[:-1], 1).contiguous()
    count = groups(inner, group_size)
    scales = x.new_empty((*x.shape[:-1], count), dtype=torch.float32)
    if not x.numel():
        return out, scales
    rows, quantized, factors = x.view(-1, inner), out.view(-1, inner), scales.view(-1, count)
    if group_size:
        least = LEAST_SCALE * largest  # bound on the largest magnitude of a group
        torch.ops._C.per_token_group_fp8_quant(
            rows, quantized, factors, group_size, least, -largest, largest, False, False, False
        )
    else:
        torch.ops._C.dynamic_scaled_int8_quant(quantized, rows, factors, None)
        scales.clamp_(min=LEAST_SCALE)  # the kernel gives a row of zeros the scale 0
    return out, scales


@functools.cache
def _multiplies(index: int, kind: torch.dtype, blocks: bool) -> bool:
    """Whether the library has a kernel for a type on a GPU."""
    has = capability(index)
    if kind is torch.int8:
        return FIRST_INT8 <= has <= LAST_INT8
    ask = torch.ops._C.cutlass_scaled_mm_supports_block_fp8 if blocks else torch.ops._C.cutlass_scaled_mm_supports_fp8
    return bool(ask(has))


def why_no_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: str, blocks: bool
) -> str:
    """Return why no compiled kernel multiplies these tensors on any GPU, or an empty string."""
    if not x.is_cuda:
        return f"x is on {x.device}, not on a GPU"
    if x.dtype is not weight.dtype or x.dtype not in (torch.int8, FP8):
        return f"x is {x.dtype} and weight {weight.dtype}, not both int8 or {FP8}"
    if blocks and x.dtype is not FP8:
        return f"the kernels have blocks of {FP8} only"
    if x_scale.dtype is not torch.float32 or weight_scale.dtype is not torch.float32:
        return f"scales are {x_scale.dtype} and {weight_scale.dtype}, not float32"
    if dtype not in RESULTS:
        return f"the result is {dtype}, not float16 or bfloat16"
    if bias is not None and bias.dtype is not RESULTS[dtype]:
        return f"bias is {bias.dtype}, not {dtype}"
    whole = GROUP if blocks else WHOLE
    if any(size % whole for size in weight.shape):
        return f"the weight's sizes {tuple(weight.shape)} are not multiples of {whole}"
    return "" if weight.is_contiguous() else "weight is not contiguous"


def _why_not(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: str, blocks: bool
) -> str:
    """Return why CUTLASS does not multiply these tensors on this GPU, or an empty string."""
    if why := why_no_product(x, x_scale, weight, weight_scale, bias, dtype, blocks):
        return why
    if not _multiplies(x.get_device(), x.dtype, blocks):
        of = f"blocks of {x.dtype}" if blocks else str(x.dtype)
        return f"the library has no kernel for {of} on compute capability {capability(x.get_device()) / 10}"
    return ""


def supports_scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> bool | str:
    """Check for int8 or fp8, results in a half type, sizes that are multiples of 16, and no blocks."""
    if block_size:
        return "the kernel has no blocks"
    return _why_not(x, x_scale, weight, weight_scale, bias, dtype, False) or True


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.scaled_linear`. fp8 is summed in the chip's short accumulator."""
    columns, inner = weight.shape
    out = x.new_empty((*x.shape[:-1], columns), dtype=RESULTS[dtype])
    if out.numel():
        rows = x.reshape(-1, inner).contiguous()
        scales = x_scale.reshape(-1, x_scale.shape[-1]).contiguous()
        product = out.view(-1, columns)
        torch.ops._C.cutlass_scaled_mm(product, rows, weight.t(), scales, weight_scale.contiguous(), bias)
    return out


def supports_scaled_blocks(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> bool | str:
    """Check for fp8 in blocks of 128 with results in a half type."""
    if not block_size:
        return "the weight has no blocks"
    if block_size != GROUP:
        return f"the kernel has blocks of {GROUP} only, not of {block_size}"
    return _why_not(x, x_scale, weight, weight_scale, bias, dtype, True) or True


def scaled_blocks(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.scaled_linear`, for blocks.

    For row counts that are not multiples of four, vLLM 0.33 uses a kernel for few rows, which takes several times as
    long for thousands of rows, and old versions refuse. So arbitrary rows are appended and dropped from the result.
    """
    columns, inner = weight.shape
    rows, scales = x.reshape(-1, inner).contiguous(), x_scale.reshape(-1, x_scale.shape[-1])
    count = rows.shape[0]
    whole = -(-count // FOUR) * FOUR
    product = x.new_empty((whole, columns), dtype=RESULTS[dtype])
    if product.numel():
        if whole == count:
            by_columns = scales.t().contiguous()  # the kernel needs adjacent scales of a group
        else:
            by_columns = scales.new_empty((scales.shape[1], whole))
            by_columns[:, :count] = scales.t()
            filled = rows.new_empty((whole, inner))
            filled[:count] = rows
            rows = filled
        torch.ops._C.cutlass_scaled_mm(product, rows, weight.t(), by_columns.t(), weight_scale.contiguous().t(), None)
    out = (product if whole == count else product[:count]).view(*x.shape[:-1], columns)
    if bias is not None:
        out += bias
    return out
