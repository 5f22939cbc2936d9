"""Activations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fl_dispatch.ops.activation import empty_result

from .limits import problem

GELU = {"none": 0, "tanh": 1}
"""The numbers of ``npu_geglu`` for the forms of GELU."""
MOST_DIMENSIONS = 8


def supports(x: Tensor, *_: Any, **__: Any) -> bool | str:
    """Check for a floating-point tensor of at most eight dimensions."""
    if x.dim() > MOST_DIMENSIONS:
        return f"x has {x.dim()} dimensions; the kernels take at most {MOST_DIMENSIONS}"
    return problem("the kernel", "x", x) or True


def supports_clipped(x: Tensor) -> bool | str:
    """Check the limits of all activations, and for at least two dimensions."""
    if x.dim() < 2:
        return "x has one dimension; npu_clipped_swiglu takes two or more"
    return supports(x)


def supports_gelu(x: Tensor, approximate: str = "none") -> bool | str:
    """Check the limits of all activations; both forms of GELU have a kernel."""
    if approximate not in GELU:
        return f"approximate is {approximate!r}, not 'none' or 'tanh'"
    return supports(x)


def silu_and_mul(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
    import torch_npu

    if not x.numel():
        return empty_result(x)
    y: Tensor = torch_npu.npu_swiglu(x.contiguous(), dim=-1)
    return y


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu`."""
    import torch_npu

    if not x.numel():
        return x.new_empty(x.shape)
    y: Tensor = torch_npu.npu_gelu(x.contiguous(), approximate=approximate)
    return y


def quick_gelu(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.quick_gelu`; the chip's "fast" GELU is this one."""
    import torch_npu

    if not x.numel():
        return x.new_empty(x.shape)
    y: Tensor = torch_npu.npu_fast_gelu(x.contiguous())
    return y


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul`.

    ``npu_gelu_mul`` computes the same, but only for rows of at most 1,024 elements.
    """
    import torch_npu

    if not x.numel():
        return empty_result(x)
    y: Tensor = torch_npu.npu_geglu(x.contiguous(), dim=-1, approximate=GELU[approximate], activate_left=True)[0]
    return y


def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.swigluoai_and_mul`."""
    return _clipped(x, alpha, limit, 1.0, True)


def silu_and_mul_with_clamp(x: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul_with_clamp`."""
    return _clipped(x, alpha, limit, beta, False)


def _clipped(x: Tensor, alpha: float, limit: float, bias: float, interleaved: bool) -> Tensor:
    import torch_npu

    if not x.numel():
        return empty_result(x)
    y: Tensor = torch_npu.npu_clipped_swiglu(
        x.contiguous(), dim=-1, alpha=alpha, limit=limit, bias=bias, interleaved=interleaved
    )
    return y
