"""RMS normalization."""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import VECTOR, narrowed, problem, widened


def supports_rms_norm(x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None) -> bool | str:
    """Check for one dtype and rows of whole vectors; overwritten tensors must be contiguous."""
    if x.shape[-1] % VECTOR:
        return f"the hidden size {x.shape[-1]} is not a multiple of {VECTOR}"
    if why := problem("x", x, contiguous=residual is not None):
        return why
    for name, tensor in (("residual", residual), ("weight", weight)):
        if tensor is not None and (why := problem(name, tensor, like=x)):
            return why
    return True


def rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.normalization.rms_norm`. With a residual both tensors are overwritten and returned."""
    wide = widened(x)
    weight = None if weight is None else weight.to(wide.dtype)
    if residual is not None:
        total = widened(residual)
        torch.ops._C.fused_add_rms_norm(wide, total, weight, epsilon)
        return narrowed(wide, x), narrowed(total, residual)
    wide = wide.contiguous()  # heads of a query or key are slices of one product
    out = torch.empty_like(wide)
    torch.ops._C.rms_norm(out, wide, weight, epsilon)
    return out.to(x.dtype)
