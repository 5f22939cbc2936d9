"""Products of quantized rows with quantized weights in this project's C++, on processors with AVX2.

``integers.cpp`` sums integers, so results are exact up to :data:`LONGEST` elements.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from fl_dispatch import cpp, native
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.moe import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS
from fl_dispatch.ops.quantized_moe import scaled_experts

from .. import library
from .expert_shapes import mismatch
from .native_calls import function, structure

SOURCE = Path(__file__).with_name("integers.cpp")
LONGEST = (1 << 31) // (128 * 128) - 1
"""Most elements of a row with a sum that fits 32 bits, even if all products are the largest."""


_Call = structure("x x_scale weight weight_scale out", "rows columns inner threads")
"""``Call`` of ``integers.cpp``."""


def why_unavailable() -> str:
    """Return why the function is unavailable, or an empty string."""
    return cpp.why_not(SOURCE) if "avx2" in library.processor_flags() else "the processor has no AVX2"


def supports_scaled_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, block_size: int = 0
) -> bool | str:
    """Check for int8 without blocks."""
    if x.dtype is not torch.int8 or weight.dtype is not torch.int8 or block_size:
        return "int8 without scales of blocks only"
    if x_scale.dtype is not torch.float32 or weight_scale.dtype is not torch.float32:
        return f"scales are {x_scale.dtype} and {weight_scale.dtype}, not float32"
    if not x.dim() or weight.dim() != 2:
        return f"{x.dim()} dimensions of x and {weight.dim()} of the weight"
    columns, inner = weight.shape
    if x_scale.shape != (*x.shape[:-1], 1) or weight_scale.shape not in ((columns, 1), (1, 1)):
        return f"scales are {tuple(x_scale.shape)} and {tuple(weight_scale.shape)}, not one a row and a column"
    if inner != x.shape[-1] or (bias is not None and bias.shape != (columns,)):
        given = "no bias" if bias is None else f"a bias of shape {tuple(bias.shape)}"
        return f"rows of {x.shape[-1]}, a weight of shape {tuple(weight.shape)} and {given} do not belong together"
    if not all(tensor.is_cpu for tensor in (x, x_scale, weight, weight_scale)):
        return "a tensor is not on the CPU"
    if not weight.is_contiguous():
        return "the elements of a weight lie apart"
    return inner <= LONGEST or f"rows of {inner} elements, with sums that may exceed 32 bits"


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
    answer = supports_scaled_linear(x, x_scale, weight, weight_scale, bias, block_size)
    native.require("" if answer is True else str(answer))
    if bias is not None:
        native.require_data((bias,))
    columns, inner = weight.shape
    # references keep the tensors alive during the call
    rows, row_scales, scales = x.contiguous(), x_scale.contiguous(), weight_scale.expand(columns, 1).contiguous()
    out = x.new_empty((*x.shape[:-1], columns), dtype=torch.float32)
    call = _Call(
        *native.addresses((rows, row_scales, weight, scales), (out,)),
        x.shape[:-1].numel(), columns, inner, torch.get_num_threads(),
    )  # fmt: skip
    if not function(SOURCE, "integer_product", 0)(ctypes.byref(call)):
        raise NotSupported("the function was compiled for a processor without AVX2")
    if bias is not None:
        out += bias
    return out.to(getattr(torch, dtype))


def supports_scaled_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    block_size: int = 0,
    out: Tensor | None = None,
) -> bool | str:
    """Check for int8 without blocks, and for the other limits of the product."""
    if w13.dtype is not torch.int8 or w2.dtype is not torch.int8 or block_size:
        return "int8 without scales of blocks only"
    if hidden_states.dtype is torch.float64 or activation not in (*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS):
        return f"{hidden_states.dtype} and the activation '{activation}'"
    gated, biases = activation in GATED_ACTIVATIONS, (w13_bias, w2_bias)
    if why := mismatch(hidden_states, w13, w2, topk_weights, topk_ids, gated, expert_map, *biases, out):
        return why
    for weight, scale in ((w13, w13_scale), (w2, w2_scale)):
        if scale.dtype is not torch.float32 or scale.shape != (*weight.shape[:2], 1):
            return f"scales are {scale.dtype} of shape {tuple(scale.shape)}, not float32, one a column"
        if not weight.is_contiguous():
            return "the elements of a weight lie apart"
        if weight.shape[2] > LONGEST:
            return f"rows of {weight.shape[2]} elements, with sums that may exceed 32 bits"
    return (
        all(tensor.is_cpu for tensor in (hidden_states, w13, w13_scale, w2, w2_scale)) or "a tensor is not on the CPU"
    )


scaled_moe = scaled_experts(scaled_linear)
"""See :data:`fl_dispatch.ops.quantized_moe.scaled_moe`. Runs the reference's steps around products with exact sums."""
