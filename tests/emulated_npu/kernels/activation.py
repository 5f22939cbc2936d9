"""Emulated activations."""

from __future__ import annotations

import math

import torch

from . import FLOAT, kernel, require, require_contiguous, require_default, require_dtype


def _halves(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    require(1 <= x.dim() <= 8, f"the input has {x.dim()} dimensions, not 1 to 8")
    require(-x.dim() <= dim < x.dim(), f"dim={dim} of {x.dim()} dimensions")
    require(x.shape[dim] % 2 == 0, f"dimension {dim} is {x.shape[dim]}, which two halves cannot share")
    left, right = x.float().chunk(2, dim)
    return left, right


def _gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@kernel("npu_swiglu")
def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """A * sigmoid(A) * B of the two halves. Source: the wheel's docstring. Assumed: float32 inside."""
    require_dtype("input", input, FLOAT)
    left, right = _halves(input, dim)
    return (left * torch.sigmoid(left) * right).to(input.dtype)


@kernel("npu_geglu")
def geglu(
    self: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Source: the wheel's docstring (approximate 0 is erf, 1 tanh), CANN's aclnnGeGluV3 for the half that is activated.

    Gives A * gelu(B) and gelu(B), with ``activate_left`` gelu(A) * B and gelu(A). Assumed: float32 inside.
    """
    require_dtype("self", self, FLOAT)
    require(approximate in (0, 1), f"approximate={approximate}, not 0 or 1")
    left, right = _halves(self, dim)
    activated, other = (left, right) if activate_left else (right, left)
    gelu = _gelu(activated, ("none", "tanh")[approximate])
    return (gelu * other).to(self.dtype), gelu.to(self.dtype)


@kernel("npu_gelu")
def gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Source: op-plugin's page. Assumed: float32 inside."""
    require_dtype("input", input, FLOAT)
    require(approximate in ("none", "tanh"), f"approximate={approximate!r}, not 'none' or 'tanh'")
    return _gelu(input.float(), approximate).to(input.dtype)


@kernel("npu_fast_gelu")
def fast_gelu(input: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-1.702 x)), the formula of the Atlas A2. Source: the wheel's docstring. Assumed: float32 inside."""
    require_dtype("input", input, FLOAT)
    return (input.float() / (1 + torch.exp(-1.702 * input.float()))).to(input.dtype)


@kernel("npu_silu")
def silu(self: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x). Source: the wheel's docstring. Assumed: float32 inside."""
    require_dtype("self", self, FLOAT)
    return (self.float() * torch.sigmoid(self.float())).to(self.dtype)


@kernel("npu_clipped_swiglu")
def clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """A * sigmoid(alpha A) * (B + bias), A at most the limit, B between minus it and it. Source: the wheel's docstring.

    A and B alternate, or they are halves. Refused: one dimension, an odd one, tensors that are not contiguous.
    Assumed: float32 inside. Groups are not emulated.
    """
    require_default(group_index=group_index)
    require_dtype("x", x, FLOAT)
    require(x.dim() > 1, "x has one dimension, more are wanted")
    require_contiguous(x=x)
    left, right = _halves(x, dim)
    if interleaved:
        pairs = x.float().flatten(dim % x.dim()).unflatten(-1, (-1, 2))
        left, right = (pairs[..., part].view(left.shape) for part in (0, 1))
    left, right = left.clamp(max=limit), right.clamp(-limit, limit)
    return (left * torch.sigmoid(alpha * left) * (right + bias)).to(x.dtype)
