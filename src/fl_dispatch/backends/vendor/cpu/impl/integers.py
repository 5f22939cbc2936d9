"""Products of int8 by the wheel's kernel, with weights repacked once (:mod:`fl_dispatch.weight_forms`).

Without instructions for int8 the kernel's sums saturate, so such processors multiply by another implementation.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fl_dispatch import weight_forms

from .. import library
from . import quantization

NAME = "vendor.cpu"
KERNELS = ("create_onednn_scaled_mm_handler", "onednn_scaled_mm", "release_dnnl_matmul_handler")
PRIMITIVES = 32
"""Most kernels that a packed weight caches, one for each number of rows."""


class Packed:
    """A weight and its scales in the form of the kernel, for results of one dtype."""

    def __init__(self, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.scale, self.dtype = scale.detach().clone(), dtype
        address = torch.ops._C.create_onednn_scaled_mm_handler(
            weight.detach().t(), self.scale, dtype, True, False, PRIMITIVES
        )
        self.handle = torch.tensor(address, dtype=torch.int64)
        self._release = torch.ops._C.release_dnnl_matmul_handler  # kept for an interpreter that shuts down

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._release(int(self.handle))


def _pack(scale: Tensor, dtype: torch.dtype, weight: Tensor, before: Packed | None) -> Packed:
    return Packed(weight, scale, dtype)


def why_unavailable() -> str:
    """Return why the kernels are not loaded, missing or inexact on this processor, or an empty string."""
    why = library.why_unavailable() or library.why_missing(KERNELS)
    return why or ("" if quantization.multiplies_int8() else quantization.NO_INT8)


def supports_scaled_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, block_size: int = 0
) -> bool | str:
    """Check for int8 with scales of rows and columns."""
    answer = quantization.supports_scaled_linear(x, x_scale, weight, block_size)
    if answer is not True:
        return answer
    columns, inner = weight.shape
    if x.shape[-1] != inner or x_scale.numel() * inner != x.numel():
        return f"x is {tuple(x.shape)} with {x_scale.numel()} scales, and the weight {tuple(weight.shape)}"
    if weight_scale.dtype is not torch.float32 or weight_scale.numel() not in (1, columns):
        return f"weight_scale is {weight_scale.dtype} {tuple(weight_scale.shape)} for {columns} columns"
    if bias is not None and (bias.shape != (columns,) or not bias.is_contiguous()):
        return f"bias is {tuple(bias.shape)}, or its elements lie apart"
    return True if weight.is_contiguous() else "the elements of the weight lie apart"


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.scaled_linear`.

    Sums are exact. PyTorch's product takes a weight that the host did not declare.
    """
    kind: torch.dtype = getattr(torch, dtype)
    packed = _packed(weight, weight_scale, kind)
    if packed is None or not x.numel():
        return quantization.scaled_linear(x, x_scale, weight, weight_scale, bias, dtype, block_size)
    columns, inner = weight.shape
    rows = x.reshape(-1, inner).contiguous()  # latent rows are slices of wider rows
    out = x.new_empty((len(rows), columns), dtype=kind)
    torch.ops._C.onednn_scaled_mm(
        out, rows, x_scale.reshape(-1, 1), None, None, None if bias is None else bias.to(kind), packed.handle
    )
    return out.view(*x.shape[:-1], columns)


def _packed(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Packed | None:
    """Return the packed weight. It holds the scales, so it is packed again if only they were written."""
    pack = partial(_pack, scale, dtype)
    packed = weight_forms.of(weight, NAME, pack)
    if packed is not None and (packed.dtype is not dtype or not torch.equal(packed.scale, scale)):
        weight_forms.weights_were_written([weight])
        packed = weight_forms.of(weight, NAME, pack)
    return packed
