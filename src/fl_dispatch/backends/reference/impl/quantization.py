"""References of quantization and of products with quantized weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fl_dispatch.ops.quantization import LARGEST, LEAST_SCALE, groups


def quantize(x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.quantization.quantize`."""
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
        quotient = quotient.round().nan_to_num(nan=0.0)  # which a cast leaves to the processor
    return quotient.to(getattr(torch, dtype)).contiguous(), scales


def _spread(scales: Tensor, inner: int, group_size: int) -> Tensor:
    """Scales of groups, one for each element of the last dimension."""
    return scales.repeat_interleave(group_size, -1)[..., :inner] if group_size > 0 else scales


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
    wide, inner = x_scale.dtype, x.shape[-1]
    if block_size:
        columns = weight_scale.repeat_interleave(block_size, 0)[: weight.shape[0]]
        product = functional.linear(
            x.to(wide) * _spread(x_scale, inner, block_size), weight.to(wide) * _spread(columns, inner, block_size)
        )
    else:  # scales of rows and columns stay out of the sum, which is exact for integers
        product = functional.linear(x.to(wide), weight.to(wide)) * x_scale * weight_scale.flatten()
    if bias is not None:
        product = product + bias.to(wide)
    return product if wide is torch.float64 else product.to(getattr(torch, dtype))


def weight_only_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.weight_only_linear`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    numbers = unpacked(weight).to(wide).reshape(*scale.shape, -1)
    if zero is not None:
        numbers = numbers - zero.to(wide)[..., None]
    elif weight.dtype is torch.uint8:
        numbers = numbers - 8
    dequantized = (numbers * scale.to(wide)[..., None]).flatten(1)
    return functional.linear(x.to(wide), dequantized, None if bias is None else bias.to(wide)).to(x.dtype)


def unpacked(weight: Tensor) -> Tensor:
    """Numbers of 4 bits, one a byte; another weight as it is."""
    if weight.dtype is not torch.uint8:
        return weight
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2)
