"""Drafts beside weights in fp8 on a GPU, with graphs and eagerly: the tokens of the same engine without drafts.

As ``tests/vllm/speculation/test_quantized_drafts.py``; the dense models are in float32, their inputs as they are or
quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import MAX_TOKENS, PROMPTS, Runs, ran, start_features

import drafters
from quantized_checkpoints import SCHEMES
from quantized_drafts import Run, models

pytestmark = pytest.mark.gpu
EAGLE, BOTH = Run("eagle3", "compressed-tensors W8A16 fp8", ""), Run("draft_model", "fp8", "fp8")
RUNS = {
    "a plain head beside weights in fp8, eagerly": (EAGLE, False),
    "a plain head beside weights in fp8, graphs": (EAGLE, True),
    "weights in fp8 of both, graphs": (BOTH, True),
}
each = pytest.mark.parametrize("name", RUNS)
COMMON: Mapping[str, Any] = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_batched_tokens": 256,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("drafters")
    made = {run: models(run, folder / str(index)) for index, run in enumerate((EAGLE, BOTH))}

    def begin(run: Run, graphs: bool) -> Any:
        steps = [
            {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}},
            {"do": "generate", "prompts": drafters.TURNS, "sampling": {"max_tokens": drafters.LONG}},
            {"do": "metrics", "contains": "spec_decode"},
        ]
        how = {"method": run.method, "model": str(made[run].drafter), "num_speculative_tokens": run.tokens}
        engine = {**COMMON, "enforce_eager": not graphs}
        target = made[run].target
        runs = (target, steps, {"speculative_config": how, **engine}), (target, steps[:2], engine)
        # A process each: choices are frozen where graphs are captured.
        return [start_features(one, VLLM_FL_DENY_VENDORS="cuda", USE_FLAGGEMS="0") for one in runs]

    begun = {name: begin(*given) for name, given in RUNS.items()}
    return Runs({(name, index): one for name, pair in begun.items() for index, one in enumerate(pair)})


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


@each
def test_greedy_tokens_are_those_without_drafts(name: str, results: Runs) -> None:
    drafted, plain = (results[name, index]["runs"][0]["steps"] for index in (0, 1))
    assert [_tokens(step) for step in drafted[:2]] == [_tokens(step) for step in plain]


@each
def test_drafts_are_accepted_and_rejected(name: str, results: Runs) -> None:
    counted = results[name, 0]["runs"][0]["steps"][2]
    accepted, made = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 0 < accepted < made


@each
def test_our_products_run_by_our_kernels(name: str, results: Runs) -> None:
    (found,), (run, _) = results[name, 0]["runs"], RUNS[name]
    assert found["report"]["layers"][SCHEMES[run.target].layer] > 0
    assert ran(found, SCHEMES[run.target].operators[-1]) == {"default.triton"}
    assert (found["report"]["native_layers"], found["report"]["failed"]) == ({}, {})
    assert found["report"]["model_runner"] == "V2"
