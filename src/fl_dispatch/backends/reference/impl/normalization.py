"""References of the normalizations.

Roundings follow vLLM's own native operators, so that a model gives the same tokens. With a residual the sum is taken in
float32 and the *unrounded* sum is normalized; the returned sum is rounded to the input dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _normalized(x: Tensor, residual: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """The sum and its normalization, both in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    return total, total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + epsilon)


def _result(y: Tensor, total: Tensor, x: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    y = y.to(x.dtype).contiguous()
    if residual is None:
        return y
    total = total.to(x.dtype).contiguous()
    if torch.compiler.is_compiling():
        # Inductor would add the two again in the next norm. It has to have the sum in memory for a view like this.
        total = total.as_strided(tuple(total.shape), total.stride())
    return y, total


def rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.normalization.rms_norm`."""
    total, y = _normalized(x, residual, epsilon)
    if weight is not None:
        # Rounded before the product, as in vLLM and in Llama's original code. A half weight on a wide input rounds
        # nothing.
        y = y.to(torch.promote_types(x.dtype, weight.dtype)) * weight
    return _result(y, total, x, residual)


def gemma_rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.normalization.gemma_rms_norm`."""
    total, y = _normalized(x, residual, epsilon)
    if weight is not None:
        y = y * (1.0 + weight.to(y.dtype))  # one rounding only, after the product
    return _result(y, total, x, residual)


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    epsilon: float = 1e-6,
    activation: str = "silu",
    group_size: int = 0,
    norm_first: bool = True,
) -> Tensor:
    """See :data:`fl_dispatch.ops.normalization.rms_norm_gated`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    gate = gate.to(wide)
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"there is no activation '{activation}' here, only silu and sigmoid")
    factor = torch.nn.functional.silu(gate) if activation == "silu" else gate.sigmoid()
    total = x.to(wide) if norm_first else x.to(wide) * factor
    size = group_size or x.shape[-1]
    groups = total.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    y = (groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + epsilon)).flatten(-2)
    if weight is not None:
        y = y * weight.to(wide)
    return (y * factor if norm_first else y).to(x.dtype).contiguous()


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    """See :data:`fl_dispatch.ops.normalization.layer_norm`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
    return torch.nn.functional.layer_norm(x.to(wide), x.shape[-1:], weight, bias, epsilon).to(x.dtype).contiguous()
