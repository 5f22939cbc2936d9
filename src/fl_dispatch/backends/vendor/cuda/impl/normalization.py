"""RMS normalization."""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import problem


def supports_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None) -> bool | str:
    """Contiguous tensors of one dtype."""
    if why := problem("x", x):
        return why
    for name, tensor in (("residual", residual), ("weight", weight)):
        if tensor is not None and (why := problem(name, tensor, like=x)):
            return why
    return True


def rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.normalization.rms_norm`. With a residual both tensors are overwritten and returned."""
    if not x.numel():  # a launch without threads raises
        return (x, residual) if residual is not None else torch.empty_like(x)
    if residual is not None:
        torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out
