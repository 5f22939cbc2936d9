"""Random tensors that depend only on a generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Source:
    """Source of tensors of one dtype on one device; the numbers are drawn on the CPU, in float32."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normal numbers around zero."""
        return (torch.randn(shape, generator=self.generator) * scale).to(device=self.device, dtype=self.dtype)

    def order(self, count: int) -> Tensor:
        """Return the numbers below ``count`` in random order, int32, on the CPU."""
        return torch.randperm(count, generator=self.generator, dtype=torch.int32)


def starts(lengths: Sequence[int]) -> Tensor:
    """Return the first row of each request, and the end of the last one, int32, on the CPU."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
