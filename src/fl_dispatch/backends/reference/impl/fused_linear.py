"""Reference of the product with a norm before it and a gate behind it: one after the other."""

from __future__ import annotations

from torch import Tensor

from . import activation, linear, normalization, quantization


def fused_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.fused_linear.fused_linear`."""
    rows, total = x, x.new_empty(0)
    if norm_weight is not None:
        normalized = normalization.rms_norm(x, residual, norm_weight, epsilon)
        rows, total = (normalized, total) if isinstance(normalized, Tensor) else normalized
    elif residual is not None:
        rows = total = x + residual
    if scale is None:
        y = linear.linear(rows, weight, bias)
    else:
        columns = scale.expand(weight.shape[0], -1)
        y = quantization.weight_only_linear(rows, weight, columns, zero, bias)
    return activation.silu_and_mul(y) if gated else y, total
