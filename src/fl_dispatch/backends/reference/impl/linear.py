"""Reference of the product with weights: PyTorch's own, which sums as its settings say."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.linear.linear`."""
    return torch.nn.functional.linear(x, weight, bias)
