"""References of the operators that quantize what another one computes: the two, one after the other."""

from __future__ import annotations

from torch import Tensor

from . import activation, normalization, quantization


def rms_norm_quantize(
    x: Tensor,
    dtype: str,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    epsilon: float = 1e-6,
    group_size: int = 0,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See :data:`fl_dispatch.ops.joined.rms_norm_quantize`."""
    normalized = normalization.rms_norm(x, residual, weight, epsilon)
    if isinstance(normalized, Tensor):
        return quantization.quantize(normalized, dtype, group_size, scale)
    y, total = normalized
    return total, *quantization.quantize(y, dtype, group_size, scale)


def silu_and_mul_quantize(
    x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.joined.silu_and_mul_quantize`."""
    return quantization.quantize(activation.silu_and_mul(x), dtype, group_size, scale)
