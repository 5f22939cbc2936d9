"""Tests on the emulated NPU. Without ``torch_npu`` nothing in this folder is collected."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from host_engines import Host

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


@pytest.fixture(scope="session")
def chip_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family → its checkpoint in the chip's sizes."""
    from fl_dispatch.cli.checkpoints import build_checkpoint
    from half_on_npu import SIZES

    folder = tmp_path_factory.mktemp("npu")
    return cache(lambda family: build_checkpoint(family, folder / family, **SIZES.get(family, {})))


@pytest.fixture(scope="session")
def npu_environment() -> Callable[..., dict[str, str]]:
    """Makes the environment of an engine whose operators are the vendor's; nothing of ours is set but what is given."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "SGLANG_", "FLAG", "USE_FLAG", "EMU_"))
    }
    fixed = {
        "VLLM_FL_PREFER": "vendor",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return lambda **variables: {**kept, **fixed, **variables}


@pytest.fixture(scope="session")
def host(npu_environment: Callable[..., dict[str, str]]) -> Host:
    from chip_engines import VLLMOnNPU

    return VLLMOnNPU(npu_environment)
