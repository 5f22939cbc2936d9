"""The host's variables for its log hold for our lines too, and its trace of functions shows our worker."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, Runs, start

import sampling

EXHAUSTIVE = sampling.seed() == sampling.ALL
STEP = {"prompts": PROMPTS[:1], "max_tokens": 4}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for traces, which have some hundred megabytes and go when the tests are done."""
    folder = tmp_path_factory.mktemp("traces")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path], traces: Path) -> Mapping[str, Any]:
    model = checkpoint("qwen3")
    traced = {"VLLM_TRACE_FUNCTION": "1", "TMPDIR": str(traces)}
    started = {"quiet": start(model, STEP, variables={"VLLM_LOGGING_LEVEL": "ERROR"})}
    if EXHAUSTIVE:
        started["traced"] = start(model, STEP, variables=traced, cold=True)
    return Runs(started)


def test_the_hosts_level_holds_for_our_lines(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert results["quiet"]["steps"][0]["tokens"] == [expected("qwen3")[0][:4]]
    assert results["quiet"]["report"]["counts"]
    assert "INFO" not in results["quiet"]["log"]


@pytest.mark.skipif(not EXHAUSTIVE, reason="a minute of tracing, which make test-all takes")
def test_the_trace_of_functions_shows_whom_our_worker_calls(
    results: Mapping[str, Any], traces: Path, expected: Callable[[str], list[list[int]]]
) -> None:
    assert results["traced"]["steps"][0]["tokens"] == [expected("qwen3")[0][:4]]
    (trace,) = traces.rglob("VLLM_TRACE_FUNCTION_for_process_*.log")
    with trace.open() as lines:
        assert any("Call to load_model in" in line and "vllm_fl/worker/base.py" in line for line in lines)
