"""Activations. The kernels round the activated half to the input dtype before they multiply."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_dispatch.ops.activation import empty_result

from .limits import problem


def supports(x: Tensor, *_: Any, **__: Any) -> bool | str:
    """A contiguous tensor."""
    return problem("x", x) or True


def supports_gelu_and_mul(x: Tensor, approximate: str = "none") -> bool | str:
    """Check what all activations need; both forms of GELU have a kernel."""
    if approximate not in ("none", "tanh"):
        return f"approximate is {approximate!r}, not 'none' or 'tanh'"
    return supports(x)


def silu_and_mul(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
    out = empty_result(x)
    if not x.numel():  # a launch without threads is an error
        return out
    torch.ops._C.silu_and_mul(out, x)
    return out


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul`."""
    out = empty_result(x)
    if not x.numel():  # a launch without threads is an error
        return out
    if approximate == "none":
        torch.ops._C.gelu_and_mul(out, x)
    else:
        torch.ops._C.gelu_tanh_and_mul(out, x)
    return out


def mul_and_silu(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.mul_and_silu`."""
    out = empty_result(x)
    if not x.numel():  # a launch without threads is an error
        return out
    torch.ops._C.mul_and_silu(out, x)
    return out


def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.fatrelu_and_mul`."""
    out = empty_result(x)
    if not x.numel():  # a launch without threads is an error
        return out
    torch.ops._C.fatrelu_and_mul(out, x, threshold)
    return out


def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.swigluoai_and_mul`."""
    out = empty_result(x)
    if not x.numel():  # a launch without threads is an error
        return out
    torch.ops._C.swigluoai_and_mul(out, x, alpha, limit)
    return out


def silu_and_mul_with_clamp(x: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul_with_clamp`."""
    out = empty_result(x)
    if not x.numel():  # a launch without threads is an error
        return out
    torch.ops._C.silu_and_mul_with_clamp(out, x, limit, alpha, beta)
    return out


def quick_gelu(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.quick_gelu`."""
    out = torch.empty_like(x)
    if not x.numel():  # a launch without threads is an error
        return out
    torch.ops._C.gelu_quick(out, x)
    return out


def relu2(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.relu2`."""
    out = torch.empty_like(x)
    if not x.numel():  # a launch without threads is an error
        return out
    torch.ops._C.relu_squared(out, x)
    return out
