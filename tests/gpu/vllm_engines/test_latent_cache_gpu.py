"""A latent cache in fp8 on a GPU: an engine with graphs computes what the network with rounded latents does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import MAX_TOKENS, PROMPTS, SCORED_STEP, ran, start_features

from latent_cache import ALL_ONE, ENGINE, OPERATORS, behind, is_as_near_in_bfloat16, others, rounded
from quantized_mixture import latent
from quantized_network import answered, computed, distance

pytestmark = pytest.mark.gpu
AGAIN: Mapping[str, Any] = {**SCORED_STEP, "sampling": {"max_tokens": MAX_TOKENS, "logprobs": 0}}
GRAPHS = {"enforce_eager": False, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 256 << 20, **ENGINE}
HALF = {**GRAPHS, "dtype": "bfloat16"}
OURS = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return latent(tmp_path_factory.mktemp("latent") / "whole")


@pytest.fixture(scope="module")
def runs(model: Path) -> list[dict[str, Any]]:
    asked = ((model, [SCORED_STEP, AGAIN], engine) for engine in (GRAPHS, HALF))
    found: list[dict[str, Any]] = start_features(*asked, **OURS).result()["runs"]
    return found


def test_it_computes_what_the_network_with_rounded_latents_does(model: Path, runs: list[dict[str, Any]]) -> None:
    texts, got = answered(PROMPTS, runs[0]["steps"][0])
    there = computed(rounded(model, ALL_ONE), texts)
    assert distance(got, there.scores) <= there.rounding
    assert there.decides(PROMPTS, MAX_TOKENS)
    for other, wrong in others(model, ALL_ONE, texts).items():
        assert distance(got, wrong) > there.rounding, other
    again = runs[0]["steps"][1]
    assert max(one["cached"] for one in again) >= 320
    assert behind(model, ALL_ONE, again) <= 2 * there.largest


def test_in_bfloat16_it_is_as_near_as_hugging_faces_network(model: Path, runs: list[dict[str, Any]]) -> None:
    assert is_as_near_in_bfloat16(model, *answered(PROMPTS, runs[1]["steps"][0]))


@pytest.mark.parametrize("number", [0, 1])
def test_our_kernels_serve_it_from_graphs(number: int, runs: list[dict[str, Any]]) -> None:
    assert all(ran(runs[number], operator) == {"default.triton"} for operator in OPERATORS)
    assert runs[number]["report"]["native_layers"] == {}
    assert runs[number]["report"]["failed"] == {}
    assert runs[number]["report"]["compiled"]["mode"] == "VLLM_COMPILE"
