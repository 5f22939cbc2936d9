"""Normalizations. The kernels return new tensors, so neither the input nor the residual is overwritten."""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import problem

MOST_DIMENSIONS = 8


def supports_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None) -> bool | str:
    """Check for two to eight dimensions, a weight, and one dtype for all."""
    if not 2 <= x.dim() <= MOST_DIMENSIONS:
        return f"x has {x.dim()} dimensions; the kernels take 2 to {MOST_DIMENSIONS}"
    if weight is None:
        return "there is no weight; the kernels need one"
    if why := problem("the kernel", "x", x):
        return why
    for name, tensor in (("residual", residual), ("weight", weight)):
        if tensor is not None and (why := problem("the kernel", name, tensor, like=x)):
            return why
    return True


def rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.normalization.rms_norm`."""
    import torch_npu

    if not x.numel():
        return _empty(x, residual)
    if residual is None:
        y: Tensor = torch_npu.npu_rms_norm(x.contiguous(), weight, epsilon)[0]
        return y
    y, _, total = torch_npu.npu_add_rms_norm(x.contiguous(), residual.contiguous(), weight, epsilon)
    return y, total


def gemma_rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.normalization.gemma_rms_norm`; the kernel adds 1 to the weight.

    No kernel adds a residual, so the sum is rounded before it is normalized.
    """
    import torch_npu

    if not x.numel():
        return _empty(x, residual)
    total = x.contiguous() if residual is None else x + residual
    y: Tensor = torch_npu.npu_gemma_rms_norm(total.contiguous(), weight, epsilon)[0]
    return y if residual is None else (y, total)


def supports_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool | str:
    """Check for one dtype."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and (why := problem("npu_layer_norm_eval", name, tensor, like=x)):
            return why
    return True


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    """See :data:`fl_dispatch.ops.normalization.layer_norm`."""
    import torch_npu

    if not x.numel():
        return x.new_empty(x.shape)
    y: Tensor = torch_npu.npu_layer_norm_eval(x.contiguous(), [x.shape[-1]], weight, bias, epsilon)
    return y


def _empty(x: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """Return the result for empty tensors, which some kernels refuse."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y if residual is None else (y, torch.empty_like(y))
