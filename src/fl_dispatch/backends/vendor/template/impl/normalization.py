"""RMS normalization."""

from __future__ import annotations

import torch
from torch import Tensor


def supports_rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> bool | str:
    """Return ``True``, or why the kernel cannot take these arguments; then the next implementation gets them.

    The check runs in every call, so read only dtypes, shapes and strides, never values.
    """
    if weight is None:
        return "the kernel needs a weight"
    return True


def rms_norm_template(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """Replace the body by the vendor's kernel.

    With a residual the kernel may overwrite ``x`` and ``residual`` and return them; without one it must write a new
    tensor. New results are contiguous; arguments may have any strides.
    """
    total = x.float() if residual is None else x.float() + residual.float()
    y = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + epsilon)
    if weight is not None:
        y = y.to(x.dtype) * weight
    y, total = y.to(x.dtype).contiguous(), total.to(x.dtype).contiguous()
    return y if residual is None else (y, total)
