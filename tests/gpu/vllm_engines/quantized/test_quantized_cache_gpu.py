"""A KV cache in fp8 on a GPU, from graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from host_engines import OURS, Served, ran
from quantized_cache import COMPRESSED, OPERATORS, PLAIN, QuantizedCaches, Run

GRAPHS = {"enforce_eager": False, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 256 << 20}
VENDORS = {"VLLM_FL_PREFER": "vendor", "USE_FLAGGEMS": "0"}
HALF = Run("FlashAttention preferred", PLAIN, {**GRAPHS, "kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"})


@pytest.mark.gpu
class TestCaches(QuantizedCaches):
    SINGLE = (
        Run("scales of 1", PLAIN, {**GRAPHS, "kv_cache_dtype": "fp8"}),
        Run("scales of a checkpoint", COMPRESSED, GRAPHS),
    )
    HALVES = (HALF,)
    ALONE = ()
    SAME = TOGETHER = False

    def place(self, run: Run) -> Mapping[str, Any]:
        return VENDORS if run is HALF else OURS

    def test_our_kernels_serve_it_whoever_is_preferred(self, run: Run, served: Callable[[Run], Served]) -> None:
        """FlashAttention 3 would quantize the queries, too, and vLLM's write takes its scales from the device."""
        (report,) = served(run).reports
        assert all(ran(report)[operator] == {"default.triton"} for operator in OPERATORS)
        assert report["compiled"]["mode"] == "VLLM_COMPILE"
