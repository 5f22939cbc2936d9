"""Two GPUs: a model divided between them gives Hugging Face's tokens, and small sums in one kernel are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytest.importorskip("vllm")

from engines import STEP, expected_tokens, ran, start

import two_ranks
from fl_dispatch.cli.checkpoints import build_checkpoint

pytestmark = pytest.mark.gpu
TWO = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.1}
STAGES = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}
DIVIDED = {**TWO, "decode_context_parallel_size": 2, "num_gpu_blocks_override": 40, "block_size": 16}
NEUTRAL = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
NATIVE = {"VLLM_FL_NATIVE_PLATFORM": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
BALANCED: Mapping[str, Any] = {
    "enforce_eager": True,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"window_size": 4, "step_interval": 4, "use_async": False, "communicator": "torch_gloo"},
}
RUNS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    "eager": ("qwen3", {"enforce_eager": True}, NEUTRAL),
    "graphs": ("qwen3", {"enforce_eager": False}, NEUTRAL),
    "experts on each rank": ("qwen3_moe", {"enforce_eager": False, "enable_expert_parallel": True}, NEUTRAL),
    "latent attention": ("deepseek_v2", {"enforce_eager": False}, NEUTRAL),
    "pipeline stages": ("qwen3", {**STAGES, "enforce_eager": False}, NEUTRAL),
    "stages, latent attention, eagerly": ("deepseek_v2", {**STAGES, "enforce_eager": True}, NEUTRAL),
    "vLLM's own platform": ("qwen3", {"enforce_eager": False}, {**NATIVE, "VLLM_FL_PREFER": "flagos"}),
}
"""Name → checkpoint, arguments of ``LLM``, variables."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda family: build_checkpoint(family, folder / family))


@pytest.fixture(scope="module")
def started(checkpoint: Callable[[str], Path]) -> Mapping[str, Future[dict[str, Any]]]:
    return {
        name: start(checkpoint(family), STEP, STEP, engine={**TWO, **engine}, variables=variables)
        for name, (family, engine, variables) in RUNS.items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_tokens_equal_hugging_faces(
    name: str, started: Mapping[str, Future[dict[str, Any]]], checkpoint: Callable[[str], Path]
) -> None:
    result = started[name].result()
    expected = expected_tokens(checkpoint(RUNS[name][0]))
    assert [step["tokens"] for step in result["steps"]] == [expected, expected]
    first, second = result["reports"]
    assert first["manifest"] == second["manifest"]
    assert (first["manifest"] is None) == RUNS[name][1]["enforce_eager"]
    assert first["native_layers"] == {}
    assert ran(result, "paged_attention") | ran(result, "mla_decode") == {"default.triton"}
    assert "during inference: " not in result["log"]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize(("family", "sizes"), [("qwen3", {"num_key_value_heads": 1}), ("deepseek_v2", {})])
def test_ranks_divide_a_cache_by_tokens(family: str, sizes: Mapping[str, int], eager: bool, tmp_path: Path) -> None:
    model = build_checkpoint(family, tmp_path / family, **sizes)
    result = start(model, STEP, STEP, engine={**DIVIDED, "enforce_eager": eager}, variables=NEUTRAL).result()
    expected = expected_tokens(model)
    assert [step["tokens"] for step in result["steps"]] == [expected, expected]
    assert ran(result, "mla_prefill") == {"default.triton"}
    assert not ran(result, "paged_attention")
    for report in result["reports"]:
        assert report["communication"]["dcp:0"]["reduce_scatter"] > 0
        assert (report["native_layers"], report["failed"]) == ({}, {})


def test_experts_change_places_and_no_token_changes(checkpoint: Callable[[str], Path]) -> None:
    """Expert load balancing on vLLM's own platform; on others ``config/parallel.py`` refuses it."""
    model = checkpoint("qwen3_moe")
    result = start(model, STEP, STEP, engine={**TWO, **BALANCED}, variables=NATIVE).result()
    expected = expected_tokens(model)
    assert [step["tokens"] for step in result["steps"]] == [expected, expected]
    assert "Rearranged experts" in result["log"]


def test_small_sums_in_one_kernel_are_right_and_each_rank_takes_the_same_size_for_small(tmp_path: Path) -> None:
    (first, second) = two_ranks.run(Path(__file__).parent / "one_shot_ranks.py", tmp_path, {"nccl": ""})["nccl"]
    assert first["chosen"] == second["chosen"]
    assert len(first["chosen"]) == 1
    assert first["wrong"] == second["wrong"] == []
    assert list(first["calls"]) == list(second["calls"]) == ["all_reduce in one kernel"]
