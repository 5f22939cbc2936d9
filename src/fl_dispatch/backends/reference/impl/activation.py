"""References of the activations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = _wide(x).chunk(2, dim=-1)
    return gate, up


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu`."""
    return functional.gelu(_wide(x), approximate=approximate).to(x.dtype).contiguous()


def quick_gelu(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.quick_gelu`."""
    wide = _wide(x)
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype).contiguous()


def relu2(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.relu2`."""
    return functional.relu(_wide(x)).square().to(x.dtype).contiguous()


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, epsilon: float = -1e-6) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.xielu`."""
    wide = _wide(x)
    positive = functional.softplus(_wide(alpha_p)) * wide * wide
    negative = (torch.expm1(wide.clamp(max=epsilon)) - wide) * (beta + functional.softplus(_wide(alpha_n)))
    return (torch.where(wide > 0, positive, negative) + beta * wide).to(x.dtype).contiguous()


def silu_and_mul(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
    gate, up = _halves(x)
    return (functional.silu(gate) * up).to(x.dtype).contiguous()


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul`."""
    gate, up = _halves(x)
    return (functional.gelu(gate, approximate=approximate) * up).to(x.dtype).contiguous()


def mul_and_silu(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.mul_and_silu`."""
    up, gate = _halves(x)
    return (up * functional.silu(gate)).to(x.dtype).contiguous()


def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.fatrelu_and_mul`."""
    gate, up = _halves(x)
    return (functional.threshold(gate, threshold, 0.0) * up).to(x.dtype).contiguous()


def _clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float, beta: float) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + beta)


def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.swigluoai_and_mul`."""
    wide = _wide(x)
    return _clamped_swiglu(wide[..., 0::2], wide[..., 1::2], limit, alpha, 1.0).to(x.dtype).contiguous()


def silu_and_mul_with_clamp(x: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul_with_clamp`."""
    return _clamped_swiglu(*_halves(x), limit, alpha, beta).to(x.dtype).contiguous()


def swiglustep_and_mul(x: Tensor, limit: float = 7.0) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.swiglustep_and_mul`."""
    gate, up = _halves(x)
    return (functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)).to(x.dtype).contiguous()


def situ_and_mul(x: Tensor, beta: float = 1.0, linear_beta: float | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.situ_and_mul`."""
    gate, up = _halves(x)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(x.dtype).contiguous()


def gelu_and_mul_sparse(x: Tensor, std_multiplier: float, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul_sparse`."""
    gate, up = _halves(x)
    centred = gate - gate.mean(dim=-1, keepdim=True)
    deviation = centred.square().mean(dim=-1, keepdim=True).sqrt()
    sparse = functional.relu(centred - std_multiplier * deviation)
    return (functional.gelu(sparse, approximate=approximate) * up).to(x.dtype).contiguous()
