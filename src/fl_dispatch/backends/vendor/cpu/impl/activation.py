"""Gated activations: two PyTorch operators, or the wheel's kernels for one or two rows of a half type.

For everything else the wheel's kernels are slower.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .limits import VECTOR, problem, rounds

FEW = 2
"""Most rows of a half type for which the kernels are faster, if they round."""
ROWS = 64
"""Rows of a half type that are computed in float32 at a time: few enough to stay in a core's cache."""


def supports_silu_and_mul(x: Tensor) -> bool | str:
    """Check for a contiguous tensor with halves of whole vectors."""
    if x.shape[-1] % (2 * VECTOR):
        return f"the last dimension {x.shape[-1]} is not a multiple of {2 * VECTOR}"
    return problem("x", x) or True


def supports_gelu_and_mul(x: Tensor, approximate: str = "none") -> bool | str:
    """Check the limits of SiLU; both forms of GELU have a kernel."""
    if approximate not in ("none", "tanh"):
        return f"approximate is {approximate!r}, not 'none' or 'tanh'"
    return supports_silu_and_mul(x)


def silu_and_mul(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
    return _gated(x, functional.silu, torch.ops._C.silu_and_mul)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul`."""
    kernels = torch.ops._C
    kernel = kernels.gelu_and_mul if approximate == "none" else kernels.gelu_tanh_and_mul
    return _gated(x, lambda gate: functional.gelu(gate, approximate=approximate), kernel)


def _gated(x: Tensor, activation: Callable[[Tensor], Tensor], kernel: Callable[[Tensor, Tensor], None]) -> Tensor:
    """Multiply the activated first half of each row by its second half, and round once."""
    if x.dtype is torch.float32:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate).mul_(up)
    width = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], width))
    if x.numel() <= FEW * 2 * width and rounds(x.dtype):
        kernel(out, x)
        return out
    rows, results = x.view(-1, 2 * width), out.view(-1, width)
    for first in range(0, len(rows), ROWS):
        gate, up = rows[first : first + ROWS].chunk(2, dim=-1)
        results[first : first + ROWS] = activation(gate.float()).mul_(up)
    return out
