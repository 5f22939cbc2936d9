"""A latent cache in fp8 on a GPU, from graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from host_engines import OURS, Served, ran
from latent_cache import ENGINE, LatentCachesOfVLLM, Run

GRAPHS = {"enforce_eager": False, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 256 << 20, **ENGINE}


@pytest.mark.gpu
class TestCaches(LatentCachesOfVLLM):
    RUNS = (Run("graphs", GRAPHS), Run("bfloat16", {**GRAPHS, "dtype": "bfloat16"}, half=True))
    PLACE = OURS

    def test_our_kernels_serve_it_from_graphs(self, run: Run, served: Callable[[Run], Served]) -> None:
        (report,) = served(run).reports
        assert all(ran(report)[operator] == {"default.triton"} for operator in self.OPERATORS)
        assert report["compiled"]["mode"] == "VLLM_COMPILE"
