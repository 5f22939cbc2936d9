"""Limits on tensors that most of FlagGems' kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def problem(name: str, tensor: Tensor, contiguous: bool = False) -> str:
    """Return why the kernels cannot take this tensor, or an empty string."""
    if tensor.get_device() < 0:
        return f"{name} is on the CPU"
    if tensor.dtype not in DTYPES:
        return f"{name} is {tensor.dtype}, not float32, float16 or bfloat16"
    if not tensor.numel():
        return f"{name} is empty"
    if contiguous and not tensor.is_contiguous():
        return f"{name} is not contiguous"
    return ""
