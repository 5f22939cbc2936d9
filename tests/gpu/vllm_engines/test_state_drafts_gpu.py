"""Drafts for models with layers that keep a state on a GPU, eagerly and from graphs: the tokens without drafts.

As ``tests/vllm/speculation/test_state_drafts.py``.
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
from state_drafts import Run

pytestmark = pytest.mark.gpu
DELTA, SPACE = Run("qwen3_5", "mtp"), Run("mamba2", "ngram")
RUNS = {
    "a predictor beside delta nets, eagerly": (DELTA, False),
    "a predictor beside delta nets, graphs": (DELTA, True),
    "look-up for state spaces, graphs": (SPACE, True),
}
each = pytest.mark.parametrize("name", RUNS)
COMMON: Mapping[str, Any] = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_batched_tokens": 256,
}
UPDATES = {"qwen3_5": "gated_delta_rule_update", "mamba2": "selective_state_update"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("states")
    made = {run: run.build(folder / run.model) for run in (DELTA, SPACE)}

    def begin(run: Run, graphs: bool) -> list[Any]:
        short = {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}}
        long = {"do": "generate", "prompts": drafters.TURNS, "sampling": {"max_tokens": drafters.LONG}}
        steps = [short, short, long, {"do": "metrics", "contains": "spec_decode"}]
        engine = {**COMMON, "enforce_eager": not graphs}
        drafted = {**engine, "speculative_config": run.speculation()}
        # A process each: choices are frozen where graphs are captured.
        runs = (made[run], steps, drafted), (made[run], steps[:3], {**engine, "enforce_eager": True})
        return [start_features(one, VLLM_FL_DENY_VENDORS="cuda", USE_FLAGGEMS="0") for one in runs]

    begun = {name: begin(*given) for name, given in RUNS.items()}
    return Runs({(name, index): one for name, pair in begun.items() for index, one in enumerate(pair)})


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


@each
def test_greedy_tokens_are_those_without_drafts_also_from_the_prefix_cache(name: str, results: Runs) -> None:
    drafted, plain = (results[name, index]["runs"][0]["steps"][:3] for index in (0, 1))
    assert [_tokens(step) for step in drafted] == [_tokens(step) for step in plain]


@each
def test_drafts_are_accepted_and_rejected(name: str, results: Runs) -> None:
    counted = results[name, 0]["runs"][0]["steps"][3]
    accepted, made = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 10 < accepted < made


@each
def test_states_advance_by_our_kernels(name: str, results: Runs) -> None:
    (found,), (run, graphs) = results[name, 0]["runs"], RUNS[name]
    assert (found["report"]["native_layers"], found["report"]["failed"]) == ({}, {})
    assert found["report"]["model_runner"] == "V2"
    assert graphs or ran(found, UPDATES[run.model]) == {"default.triton"}  # in a graph a replay is no call
