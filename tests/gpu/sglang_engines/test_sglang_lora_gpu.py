"""LoRA in SGLang on a GPU, by its Triton kernels and from graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sglang_on_gpu import NEUTRAL, OURS, replayed

from adapters import AdaptersOfSGLang, Run
from host_engines import Served, ran
from running import MAX_TOKENS

EXACT = {**NEUTRAL, "TRITON_F32_DEFAULT": "ieee", "SGLANG_FL_PLUGIN_MODULES": ""}
"""SGLang's kernels would multiply float32 in TF32, and the merged weights are compared in float32."""
LIMITS = {"max_loras_per_batch": 3, "max_lora_rank": 16, "max_running_requests": 6}


@pytest.mark.gpu
class TestAdapters(AdaptersOfSGLang):
    RUNS = [Run(backend, {"lora_backend": backend, **LIMITS}, EXACT) for backend in ("csgmv", "triton")]
    OPERATORS = ("rms_norm", "paged_attention", "kv_cache_write")

    def test_our_kernels_ran_and_graphs_held_them(self, run: Run, served: Callable[[Run], Served]) -> None:
        (report,) = served(run).reports
        assert all(ran(report)[operator] == OURS for operator in self.OPERATORS)
        assert replayed(report, 3 * (MAX_TOKENS - 1))
