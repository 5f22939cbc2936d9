"""gpt-oss in MXFP4 on a GPU, eagerly and from graphs: Hugging Face's tokens in float32, and bfloat16 near them.

As ``tests/vllm/quantization/test_gpt_oss.py``; ``test_quantized_gpu.py`` compares the kernels with float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import STEP, Runs, expected_tokens, ran, start

import gpt_oss

pytestmark = pytest.mark.gpu
EAGER: Mapping[str, Any] = {"enforce_eager": True, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 256 << 20}
GRAPHS = {**EAGER, "enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
NEUTRAL = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
RUNS: Mapping[str, Mapping[str, Any]] = {
    "eager": EAGER,
    "graphs": GRAPHS,
    "bfloat16, eager": {**EAGER, "dtype": "bfloat16"},
    "bfloat16, graphs": {**GRAPHS, "dtype": "bfloat16"},
}
IN_FULL = [name for name in RUNS if "bfloat16" not in name]
HALF = [name for name in RUNS if "bfloat16" in name]
AGREE = 0.5
"""The share of a half type's tokens that are those of float32, at least: one that rounding turns changes the rest."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("gpt-oss")
    published = gpt_oss.write_checkpoint(root / "published")
    return {"published": published, "plain": gpt_oss.dequantized(published, root / "dequantized")}


@pytest.fixture(scope="module")
def results(models: Mapping[str, Path]) -> Mapping[str, Any]:
    made = {
        name: start(models["published"], STEP, engine=dict(engine), variables=NEUTRAL) for name, engine in RUNS.items()
    }
    return Runs(made)


@pytest.mark.parametrize("name", IN_FULL)
def test_tokens_equal_those_of_the_dequantized_network(
    name: str, results: Mapping[str, Any], models: Mapping[str, Path]
) -> None:
    assert results[name]["steps"][0]["tokens"] == expected_tokens(models["plain"])


@pytest.mark.parametrize("name", HALF)
def test_tokens_of_a_half_type_are_mostly_those_of_float32(
    name: str, results: Mapping[str, Any], models: Mapping[str, Path]
) -> None:
    pairs = zip(results[name]["steps"][0]["tokens"], expected_tokens(models["plain"]), strict=True)
    same = [one == other for got, right in pairs for one, other in zip(got, right, strict=True)]
    assert sum(same) >= AGREE * len(same)


@pytest.mark.parametrize("name", RUNS)
def test_experts_run_by_our_kernel(name: str, results: Mapping[str, Any]) -> None:
    assert ran(results[name], "weight_only_moe") == {"default.triton"}
    assert results[name]["report"]["native_layers"] == {}
    assert results[name]["report"]["failed"] == {}
