"""Quantized rows in int8, and products with quantized weights.

The Atlas A2 and A3 chips of the documentation have no fp8. Their 4-bit layout (``npu_convert_weight_to_int4pack``) is
not used: it would need a second copy of the weight, and PyTorch cannot detect writes to a weight on this device
(:mod:`fl_dispatch.weight_forms`). So each call converts 4 bits to int8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_dispatch.ops.quantization import LARGEST, LEAST_SCALE

from .limits import FLOATS, HALVES, named, problem

LARGEST_AXIS = 65535
"""Most rows and most columns of a weight."""
GROUP_MULTIPLE = 32
"""Divisor of the group size of a weight."""


def supports_quantize(x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None) -> bool | str:
    """Check for int8 with a scale for each row, for whole groups or for all rows, or with a given float32 scale."""
    if dtype != "int8":
        return f"the kernels quantize to int8, not to {dtype}"
    if scale is not None:
        return problem("npu_quantize", "x", x, FLOATS) or problem("npu_quantize", "scale", scale, FLOATS[:1]) or True
    if group_size > 0 and x.shape[-1] % group_size:
        return f"a row of {x.shape[-1]} has a shorter last group of {group_size}; npu_dynamic_quant takes whole ones"
    return problem("npu_dynamic_quant", "x", x, HALVES) or True


def quantize(x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.quantization.quantize`.

    ``npu_quantize`` gets float32, because its sources agree on no other ``x`` for a scale of float32. The least scale
    is applied after ``npu_dynamic_quant``, so rows with a largest element below ``127 * 1e-10`` come out too large.
    """
    import torch_npu

    leading, inner = x.shape[:-1], x.shape[-1]
    if not x.numel():
        scales = x.new_empty((*leading, inner // group_size if group_size > 0 else 1), dtype=torch.float32)
        return x.new_empty(x.shape, dtype=torch.int8), scales
    if scale is not None:
        q = torch_npu.npu_quantize(x.reshape(-1, inner).float().contiguous(), scale, None, torch.qint8, -1, True)
        return q.clamp(min=-int(LARGEST["int8"])).view(x.shape), scale.expand(*leading, 1).contiguous()
    width = x.numel() if group_size < 0 else group_size or inner
    q, scales = torch_npu.npu_dynamic_quant(x.reshape(-1, width).contiguous())
    scales = scales.clamp(min=LEAST_SCALE)
    if group_size < 0:
        scales = scales.expand(leading.numel()).contiguous()
    return q.view(x.shape), scales.view(*leading, -1)


def supports_scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> bool | str:
    """Check for int8 without blocks, with results in float16 or bfloat16."""
    for name, tensor in (("x", x), ("weight", weight)):
        if why := problem("npu_quant_matmul", name, tensor, (torch.int8,)):
            return why
    if block_size:
        return f"there are blocks of {block_size}; npu_quant_matmul takes a scale for each row and column"
    if dtype not in map(_name, HALVES):
        return f"the result is {dtype}; npu_quant_matmul makes {named(HALVES)}"
    for name, tensor in (("x_scale", x_scale), ("weight_scale", weight_scale)):
        if why := problem("npu_quant_matmul", name, tensor, FLOATS[:1]):
            return why
    if bias is not None and (why := problem("npu_quant_matmul", "bias", bias)):
        return why
    return _too_large("npu_quant_matmul", x, weight) or True


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.scaled_linear`. Passes a bias as float32, which fits both results."""
    import torch_npu

    result = getattr(torch, dtype)
    shape = (*x.shape[:-1], weight.shape[0])
    if not x.numel():
        return x.new_empty(shape, dtype=result)
    y: Tensor = torch_npu.npu_quant_matmul(
        x.reshape(-1, x.shape[-1]).contiguous(),
        weight.contiguous().t(),
        weight_scale.flatten(),
        pertoken_scale=x_scale.flatten(),
        bias=None if bias is None else bias.float(),
        output_dtype=result,
    )
    return y.view(shape)


def supports_weight_only_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> bool | str:
    """Check for half types, and 4 or 8 bits with a scale for each column or for groups of a multiple of 32."""
    kernel = "npu_weight_quant_batchmatmul"
    if why := problem(kernel, "x", x, HALVES):
        return why
    if weight.dtype not in (torch.int8, torch.uint8):
        return f"weight is {_name(weight.dtype)}; {kernel} takes int8 and 4 bits"
    for name, tensor in (("scale", scale), ("bias", bias)):
        if tensor is not None and (why := problem(kernel, name, tensor, HALVES, like=x)):
            return why
    size = x.shape[-1] // scale.shape[1]
    if scale.shape[1] > 1 and size % GROUP_MULTIPLE:
        return f"a group has {size} elements; {kernel} takes multiples of {GROUP_MULTIPLE}"
    return _too_large(kernel, x, weight) or True


def weight_only_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.weight_only_linear`. The kernel adds an offset, the negated zero."""
    import torch_npu

    shape, groups = (*x.shape[:-1], weight.shape[0]), scale.shape[1]
    if not x.numel():
        return x.new_empty(shape)
    offset = None if zero is None else zero.to(x.dtype).neg().t()
    if weight.dtype is torch.uint8:
        weight = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).to(torch.int8)
        if zero is None:
            weight -= 8
    if bias is not None and x.dtype is torch.bfloat16:
        bias = bias.float()
    y: Tensor = torch_npu.npu_weight_quant_batchmatmul(
        x.reshape(-1, x.shape[-1]).contiguous(),
        weight.contiguous().t(),
        scale.contiguous().t(),
        antiquant_offset=offset,
        bias=bias,
        antiquant_group_size=x.shape[-1] // groups if groups > 1 else 0,
    )
    return y.view(shape)


def _name(dtype: torch.dtype) -> str:
    return named((dtype,))


def _too_large(kernel: str, x: Tensor, weight: Tensor) -> str:
    """Return why a kernel cannot take matrices of these sizes, or an empty string."""
    columns, inner = weight.shape[0], x.shape[-1]
    if max(columns, inner) <= LARGEST_AXIS:
        return ""
    return f"the weight has {columns} x {inner} elements; {kernel} takes at most {LARGEST_AXIS} in a dimension"
