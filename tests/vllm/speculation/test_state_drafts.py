"""Drafts for models with layers that keep a state: no token changes, and the state goes back to what was accepted.

Drafts come from a predictor of one more token (MTP) that drafts several times, and from the text (n-grams), which has
none for some requests. The third prompt is read in chunks beside requests that decode, and the last one has one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MAX_TOKENS, PROMPTS, Runs, expected_tokens, start_features

import drafters
from running import reference_network
from sampling import drawn
from state_drafts import TIED, Run

pytestmark = pytest.mark.engine


RUNS = (
    Run("qwen3_5", "mtp"),
    Run("qwen3_5", "mtp", "compressed-tensors W8A16 fp8"),
    Run("qwen3_5", "mtp", compiled=True),
    Run("qwen3_5", "ngram"),
    Run("mamba2", "ngram"),
    Run("granitemoehybrid", "ngram"),
    Run("lfm2", "ngram"),
)
DRAWN = drawn(RUNS, 2, "drafts for states")
each = pytest.mark.parametrize("run", DRAWN, ids=str)
SAMPLES = 1500
SPREAD = {"n": SAMPLES, "temperature": drafters.TEMPERATURE, "top_k": drafters.TOP, "seed": 3, "max_tokens": 2}
ENGINE = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 128 << 20}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Run, Path]:
    folder = tmp_path_factory.mktemp("states")
    return {run: run.build(folder / str(index)) for index, run in enumerate(DRAWN)}


@pytest.fixture(scope="module")
def results(models: dict[Run, Path]) -> Runs:
    """The engine with drafts, and the one without."""

    def begin(run: Run) -> Any:
        short = {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}}
        long = {"do": "generate", "prompts": drafters.TURNS, "sampling": {"max_tokens": drafters.LONG}}
        counters, model = {"do": "metrics", "contains": "spec_decode"}, models[run]
        steps = [short, short, long, counters, {"do": "generate", "prompts": PROMPTS[:1], "sampling": SPREAD}]
        engine = {**ENGINE, "enforce_eager": not run.compiled}
        drafted = {**engine, "speculative_config": run.speculation()}
        return start_features((model, steps, drafted)), start_features((model, [short, short, long], ENGINE))

    begun = {run: begin(run) for run in DRAWN}
    return Runs({(run, index): one for run, pair in begun.items() for index, one in enumerate(pair)})


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


@each
def test_greedy_tokens_are_those_without_drafts_also_from_the_prefix_cache(run: Run, results: Runs) -> None:
    drafted, plain = (results[run, index]["runs"][0]["steps"][:3] for index in (0, 1))
    assert [_tokens(step) for step in drafted] == [_tokens(step) for step in plain]


@pytest.mark.parametrize("run", [run for run in DRAWN if not run.scheme], ids=str)
def test_greedy_tokens_equal_hugging_face(run: Run, results: Runs, models: dict[Run, Path]) -> None:
    assert _tokens(results[run, 0]["runs"][0]["steps"][0]) == expected_tokens(models[run])


@each
def test_drafts_are_accepted_and_rejected(run: Run, results: Runs) -> None:
    counted = results[run, 0]["runs"][0]["steps"][3]
    accepted, made = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert (10 if run.model != TIED else -1) < accepted < made


@pytest.mark.parametrize("run", [run for run in DRAWN if not run.scheme and run.model != TIED], ids=str)
def test_sampled_tokens_keep_the_networks_distribution(run: Run, results: Runs, models: dict[Run, Path]) -> None:
    sampled = results[run, 0]["runs"][0]["steps"][4][0]["tokens"]
    assert len(sampled) == SAMPLES
    drafters.check_pairs(reference_network(models[run], torch.float32), PROMPTS[0], sampled)


@each
def test_every_layer_is_ours(run: Run, results: Runs) -> None:
    (found,) = results[run, 0]["runs"]
    assert (found["report"]["native_layers"], found["report"]["model_runner"]) == ({}, "V2")
