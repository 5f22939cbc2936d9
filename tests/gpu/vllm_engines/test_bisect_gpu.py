"""``fl bisect`` finds what is planted in vLLM on a GPU, eagerly and with graphs, and blames nothing that is right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from bisecting import PlantedFaults
from fl_dispatch.cli.bisect.selftest import TESTS


@pytest.mark.gpu
class TestFaults(PlantedFaults):
    FAULTS = [name for name, test in TESTS.items() if test.ranks == 1]

    def arguments(self, fault: str) -> Sequence[str]:
        return ("--engine-arg", "gpu_memory_utilization=0.1", "--engine-arg", f"kv_cache_memory_bytes={1 << 30}")
