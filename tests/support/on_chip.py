"""Tensors of the emulated NPU, and their comparison with the CPU's."""

from __future__ import annotations

from collections.abc import Callable

import torch

Numbers = Callable[..., torch.Tensor]
"""The type of the fixture ``normal``."""


def npu(values: list, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="npu")


def close(made: torch.Tensor, expected: object, **tolerance: float) -> None:
    expected = expected if isinstance(expected, torch.Tensor) else torch.tensor(expected)
    torch.testing.assert_close(made.cpu(), expected.to(made.dtype), **tolerance)
