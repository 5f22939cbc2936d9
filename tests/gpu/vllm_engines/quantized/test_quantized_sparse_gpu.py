"""Quantized sparse latent attention on a GPU, eagerly and from graphs, in float32, by our kernels.

As ``tests/vllm/quantization/test_quantized_sparse.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from host_engines import ON_GPU, OURS, Served, ran
from quantized_mixture import LATENT_LAYERS, QuantizedSparse, SparseRun

BLOCKS = "fp8, blocks of 128"
EAGER = {**ON_GPU, "enforce_eager": True}
GRAPHS = {**ON_GPU, "enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}


@pytest.mark.gpu
class TestSparse(QuantizedSparse):
    ATTENTION = ("kv_cache_write", "mla_prefill", "index_key_write", "index_topk", "mla_sparse")
    ALONE = ()  # choices are frozen where graphs are captured
    PLACE = OURS
    UNIT = 2.0**-22  # matrix units cut off what they add, so right results may be farther apart than on a CPU
    RUNS = [SparseRun(BLOCKS, EAGER, "eager"), SparseRun(BLOCKS, GRAPHS, "graphs"), SparseRun("awq", EAGER, "eager")]

    def test_our_kernels_compute_it(self, run: SparseRun, served: Callable[[SparseRun], Served]) -> None:
        (report,) = served(run).reports
        assert report["attention"] == {"SparseMLAFLImpl": LATENT_LAYERS}
        assert all(ran(report)[operator] == {"default.triton"} for operator in self.operators(run))
