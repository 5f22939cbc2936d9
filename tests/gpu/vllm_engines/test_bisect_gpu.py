"""``fl bisect`` finds what is planted in vLLM on a GPU, eagerly and with graphs, and blames nothing that is right."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

import engines

import bisecting
from fl_dispatch.cli.bisect.selftest import TESTS

pytestmark = pytest.mark.gpu
MEMORY = ("--engine-arg", "gpu_memory_utilization=0.1", "--engine-arg", f"kv_cache_memory_bytes={1 << 30}")


@pytest.mark.parametrize("name", [name for name, test in TESTS.items() if test.ranks == 1])
def test_a_planted_fault_is_found_and_nothing_else_is_blamed(name: str) -> None:
    bisecting.check("vllm", name, engines.environment(), *MEMORY)
