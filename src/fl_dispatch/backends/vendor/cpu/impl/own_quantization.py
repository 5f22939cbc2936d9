"""Products of a few rows with quantized weights in this project's C++, on any processor.

``quantized.cpp`` reads weights in their stored form, so memory holds one copy, and sums in float32.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from fl_dispatch import cpp, native

from .native_calls import function, structure
from .own_attention import problem

SOURCE = Path(__file__).with_name("quantized.cpp")
MANY = 32
"""Most rows for which this is faster than converting the whole weight to float32 for a product of matrices."""


_Call = structure("x weight scale zero out", "rows columns inner groups bits threads")
"""``Call`` of ``quantized.cpp``."""


def why_unavailable() -> str:
    """Return why the function is unavailable, or an empty string."""
    return cpp.why_not(SOURCE)


def supports_weight_only_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> bool | str:
    """Check for a few rows, and for integers of 4 or 8 bits."""
    if why := _why_not(x, weight, scale, zero, bias):
        return why
    many = x.shape[:-1].numel() > MANY
    return f"more than {MANY} rows, which a product of matrices is faster for" if many else True


def _why_not(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> str:
    """Return why the function cannot take these tensors, or an empty string."""
    if weight.dtype not in (torch.uint8, torch.int8):
        return f"weights are {weight.dtype}, not integers of 4 or 8 bits"
    if why := problem(x=x, scale=scale):
        return why
    if scale.dim() != 2 or not scale.shape[1] or x.shape[-1] % scale.shape[1]:
        return f"{x.shape[-1]} elements of a row are not whole groups of scales of shape {tuple(scale.shape)}"
    if weight.dtype is torch.uint8 and x.shape[-1] // scale.shape[1] % 2:
        return "a byte of two numbers lies in two groups"
    if zero is not None and (zero.dtype is not torch.int8 or zero.shape != scale.shape):
        return f"zero is {zero.dtype} of shape {tuple(zero.shape)}, not int8 in the scales' shape"
    if why := _mismatch(x, weight, scale.shape[0], bias):
        return why
    given = (weight, scale) if zero is None else (weight, scale, zero)
    return _limits(x, *given)


def weight_only_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.weight_only_linear`."""
    native.require(_why_not(x, weight, scale, zero, bias))
    if bias is not None:
        native.require_data((bias,))
    product = _product(x, weight, scale, zero)
    if bias is not None:
        product += bias
    return product.to(x.dtype)


def _mismatch(x: Tensor, weight: Tensor, columns: int, bias: Tensor | None) -> str:
    """Return why these shapes do not fit together, or an empty string."""
    inner = x.shape[-1] // 2 if weight.dtype is torch.uint8 else x.shape[-1]
    if weight.shape != (columns, inner):
        return f"weight has shape {tuple(weight.shape)}, not {(columns, inner)}"
    if bias is not None and bias.shape != (columns,):
        return f"bias has shape {tuple(bias.shape)}, not {(columns,)}"
    return ""


def _limits(x: Tensor, *weights: Tensor) -> str:
    """Return why the function cannot take these devices or layouts, or an empty string."""
    if not all(tensor.is_cpu for tensor in (x, *weights)):
        return "a tensor is not on the CPU"
    if not all(tensor.is_contiguous() for tensor in weights):
        return "the elements of a weight lie apart"
    return ""


def _product(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Compute the product in float32; the scale is float32 or bfloat16."""
    columns, groups = scale.shape
    rows, out = x.float().contiguous(), x.new_empty((*x.shape[:-1], columns), dtype=torch.float32)
    call = _Call(
        *native.addresses((rows, weight, scale, zero), (out,)),
        x.shape[:-1].numel(), columns, x.shape[-1], groups, 4 if weight.dtype is torch.uint8 else 8,
        torch.get_num_threads(),
    )  # fmt: skip
    function(SOURCE, "quantized_product")(ctypes.byref(call), scale.dtype is torch.bfloat16)
    return out
