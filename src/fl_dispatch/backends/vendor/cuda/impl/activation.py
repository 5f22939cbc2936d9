"""Activations. The kernels round the activated half to the input dtype before they multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl_dispatch.ops.activation import empty_result

from .limits import problem


def supports(x: Tensor, *_: Any, **__: Any) -> bool | str:
    """Check for a contiguous tensor."""
    return problem("x", x) or True


def supports_gelu_and_mul(x: Tensor, approximate: str = "none") -> bool | str:
    """Check the limits of all activations; both forms of GELU have a kernel."""
    if approximate not in ("none", "tanh"):
        return f"approximate is {approximate!r}, not 'none' or 'tanh'"
    return supports(x)


def _filled(out: Tensor, x: Tensor, kernel: Callable[..., None], *rest: float) -> Tensor:
    """``out`` with the kernel's result."""
    if x.numel():  # a launch without threads raises
        kernel(out, x, *rest)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
    return _filled(empty_result(x), x, torch.ops._C.silu_and_mul)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul`."""
    kernels = torch.ops._C
    return _filled(empty_result(x), x, kernels.gelu_and_mul if approximate == "none" else kernels.gelu_tanh_and_mul)


def mul_and_silu(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.mul_and_silu`."""
    return _filled(empty_result(x), x, torch.ops._C.mul_and_silu)


def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.fatrelu_and_mul`."""
    return _filled(empty_result(x), x, torch.ops._C.fatrelu_and_mul, threshold)


def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.swigluoai_and_mul`."""
    return _filled(empty_result(x), x, torch.ops._C.swigluoai_and_mul, alpha, limit)


def silu_and_mul_with_clamp(x: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul_with_clamp`."""
    return _filled(empty_result(x), x, torch.ops._C.silu_and_mul_with_clamp, limit, alpha, beta)


def quick_gelu(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.quick_gelu`."""
    return _filled(torch.empty_like(x), x, torch.ops._C.gelu_quick)


def relu2(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.relu2`."""
    return _filled(torch.empty_like(x), x, torch.ops._C.relu_squared)
