"""Comparisons of tensors that may hold NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_dispatch.ops.quantization import FP4


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers, and NaN in the same places."""
    if one.dtype is FP4:
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.double(), other.double()
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
