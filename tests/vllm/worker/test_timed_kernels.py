"""Ranks of a real engine that find other configurations of a kernel fastest serve with the same one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import start
from vllm.v1.worker.gpu_worker import Worker

from vllm_fl.worker import gpu, ranks

ENGINE = {
    "enforce_eager": False,
    "compilation_config": {"mode": 3, "backend": "eager"},
    "tensor_parallel_size": 2,
}


def test_ranks_that_measure_differently_serve_with_one_configuration(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    variables = {
        "TRITON_INTERPRET": "1",
        "VLLM_FL_PREFER": "reference",
        "VLLM_FL_PLUGIN_MODULES": "timed_plugin",
        "VLLM_FL_PER_OP": "silu_and_mul=vendor:timed",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    result = start(checkpoint("qwen3"), engine=ENGINE, variables=variables, cold=True).result()
    assert result["steps"][0]["tokens"] == expected("qwen3")
    first, second = (report["manifest"]["tactics"] for report in result["reports"])
    assert first == second
    (kernel,) = first
    assert kernel.startswith("timed_plugin.kernel ")
    assert all(words.startswith("BLOCK: 64,") for words in first[kernel].values())
    assert "0 known from earlier starts; ranks had others in 1" in result["log"]


def test_on_a_gpu_they_agree_before_a_graph_holds_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(ranks, "agree_on_tactics", lambda: order.append("agree"))
    monkeypatch.setattr(Worker, "_get_cudagraph_capture_context", lambda _: order.append("capture"))
    object.__new__(gpu.GPUWorkerFL)._get_cudagraph_capture_context()
    assert order == ["agree", "capture"]
