"""Tests on the emulated NPU. Without ``torch_npu`` nothing in this folder is collected."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("torch_npu") else ["test_*.py"]


@pytest.fixture(autouse=True)
def counters() -> None:
    """Each test counts its own calls."""
    import emulated_npu

    emulated_npu.reset_calls()


@pytest.fixture
def normal() -> Callable[..., torch.Tensor]:
    """Makes reproducible normal numbers on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return make
