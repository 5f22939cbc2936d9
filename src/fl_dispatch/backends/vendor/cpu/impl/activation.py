"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import VECTOR, problem


def supports_silu_and_mul(x: Tensor) -> bool | str:
    """A contiguous tensor whose halves are whole vectors."""
    if x.shape[-1] % (2 * VECTOR):
        return f"the last dimension {x.shape[-1]} is not a multiple of {2 * VECTOR}"
    return problem("x", x) or True


def supports_gelu_and_mul(x: Tensor, approximate: str = "none") -> bool | str:
    """As for SiLU; both forms of GELU have a kernel."""
    if approximate not in ("none", "tanh"):
        return f"approximate is {approximate!r}, not 'none' or 'tanh'"
    return supports_silu_and_mul(x)


def _empty(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def silu_and_mul(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
    out = _empty(x)
    torch.ops._C.silu_and_mul(out, x)
    return out


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul`."""
    out = _empty(x)
    if approximate == "none":
        torch.ops._C.gelu_and_mul(out, x)
    else:
        torch.ops._C.gelu_tanh_and_mul(out, x)
    return out
