"""Comparisons of tensors, and the size of the largest one that is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fl_dispatch.ops.quantization import FP4


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers, and NaN in the same places."""
    if one.dtype is FP4:
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.double(), other.double()
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


class Largest(TorchDispatchMode):
    """Record the largest number of elements of any result in the context; tests bound memory by it."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, result.numel() if isinstance(result, Tensor) else 0)
        return result
