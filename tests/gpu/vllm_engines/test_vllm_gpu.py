"""vLLM on a GPU through the plugin: greedy tokens equal Hugging Face's in float32, on both model runners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import STEP, expected_tokens, ran, start

from fl_dispatch.cli.checkpoints import build_checkpoint

pytestmark = pytest.mark.gpu
GRAPHS = {"enforce_eager": False, "gpu_memory_utilization": 0.1}
EAGER = {"enforce_eager": True, "gpu_memory_utilization": 0.1}
ASKED = {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
NEUTRAL = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
RUNS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str], str]] = {
    "V2, eager": ("qwen3", EAGER, NEUTRAL, "default.triton"),
    "V1, eager": ("llama", EAGER, {**V1, **NEUTRAL}, "default.triton"),
    "V2, graphs": ("qwen3", GRAPHS, NEUTRAL, "default.triton"),
    "V1, graphs": ("llama", GRAPHS, {**V1, **NEUTRAL}, "default.triton"),
    "experts, graphs": ("qwen3_moe", GRAPHS, NEUTRAL, "default.triton"),
    "latent attention, eager": ("deepseek_v3", EAGER, NEUTRAL, "default.triton"),
    "latent attention, graphs": ("deepseek_v2", GRAPHS, NEUTRAL, "default.triton"),
    "latent attention, references": ("deepseek_v3", EAGER, {"VLLM_FL_PREFER": "reference"}, "reference.torch"),
    "sparse latent attention, eager": ("deepseek_v32", EAGER, NEUTRAL, "default.triton"),
    "sparse latent attention, graphs": ("glm_moe_dsa", GRAPHS | ASKED, NEUTRAL, "default.triton"),
    "references, graphs between attention": ("llama", GRAPHS, {"VLLM_FL_PREFER": "reference"}, "reference.torch"),
}
"""Name → checkpoint, arguments of ``LLM``, variables, and what must run attention."""
ATTENTION = ("paged_attention", "mla_decode", "mla_prefill", "index_topk", "mla_sparse")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda family: build_checkpoint(family, folder / family))


@pytest.mark.parametrize("name", RUNS)
def test_tokens_equal_hugging_face_twice(name: str, checkpoint: Callable[[str], Path]) -> None:
    family, engine, variables, attention = RUNS[name]
    result = start(checkpoint(family), STEP, STEP, engine=engine, variables=variables).result()
    expected = expected_tokens(checkpoint(family))
    assert [step["tokens"] for step in result["steps"]] == [expected, expected]
    assert set().union(*(ran(result, operator) for operator in ATTENTION)) == {attention}
    assert result["report"]["failed"] == {}
    assert result["report"]["native_layers"] == {}
    assert result["steps"][1]["cached"] != [0] * len(expected)
    assert "during inference: " not in result["log"]  # vLLM's monitor of late compilations
