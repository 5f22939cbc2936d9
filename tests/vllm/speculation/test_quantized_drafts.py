"""Drafts beside quantized weights, the target's or the drafter's, change no greedy token, and no distribution.

As :mod:`test_drafts`. The tokens are those of the same engine without drafts, about which :mod:`test_quantized` is.
"""

from __future__ import annotations

from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, Runs, start_features

import drafters
from quantized_checkpoints import SCHEMES
from quantized_drafts import Models, Run, models
from quantized_network import network
from sampling import drawn

pytestmark = pytest.mark.engine

RUNS = (
    Run("draft_model", "awq", "compressed-tensors W8A16 fp8"),
    Run("draft_model", "", "compressed-tensors W4A16"),
    Run("eagle", "gptq", ""),
    Run("eagle3", "compressed-tensors W8A16 fp8", ""),
    Run("eagle3", "fp8", ""),
    Run("mtp", "awq", "awq", 1),
    Run("mtp", "fp8, blocks of 128", "fp8, blocks of 128", 1),
)
DRAWN = drawn(RUNS, 2, "quantized, who drafts")
each = pytest.mark.parametrize("run", DRAWN, ids=str)
TOLD = [run for run in DRAWN if run != RUNS[-1]]
"""Runs with a network that tells each token's probability: latent attention quantizes inputs in steps of a prompt only.
"""
SAMPLES = 1500
SPREAD = {"n": SAMPLES, "temperature": drafters.TEMPERATURE, "top_k": drafters.TOP, "seed": 3, "max_tokens": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[Run, Models]:
    folder = tmp_path_factory.mktemp("drafters")
    return {run: models(run, folder / str(index)) for index, run in enumerate(DRAWN)}


@pytest.fixture(scope="module")
def results(made: dict[Run, Models]) -> Runs:
    """The engine with drafts, and the one without."""

    def begin(run: Run) -> Any:
        steps = [
            {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}},
            {"do": "generate", "prompts": drafters.TURNS, "sampling": {"max_tokens": drafters.LONG}},
            {"do": "metrics", "contains": "spec_decode"},
            {"do": "generate", "prompts": PROMPTS[:1], "sampling": SPREAD},
        ]
        how = {"method": run.method, "model": str(made[run].drafter), "num_speculative_tokens": run.tokens}
        target, engine = made[run].target, {"max_num_seqs": 64, "max_num_batched_tokens": 256}
        return start_features((target, steps, {"speculative_config": how, **engine}), (target, steps[:2], engine))

    return Runs({run: begin(run) for run in DRAWN})


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


@each
def test_greedy_tokens_are_those_without_drafts(run: Run, results: Runs) -> None:
    drafted, plain = (found["steps"] for found in results[run]["runs"])
    assert [_tokens(step) for step in drafted[:2]] == [_tokens(step) for step in plain]


@each
def test_drafts_are_accepted_and_rejected(run: Run, results: Runs) -> None:
    counted = results[run]["runs"][0]["steps"][2]
    accepted, drafted = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 0 < accepted < drafted


@pytest.mark.parametrize("run", TOLD, ids=str)
def test_sampled_tokens_keep_the_dequantized_networks_distribution(
    run: Run, results: Runs, made: dict[Run, Models]
) -> None:
    right = network(SCHEMES[run.target] if run.target else None, model=made[run].plain)
    sampled = results[run]["runs"][0]["steps"][3][0]["tokens"]
    assert len(sampled) == SAMPLES
    drafters.check_pairs(right, PROMPTS[0], sampled)


@each
def test_both_models_run_our_products(run: Run, results: Runs) -> None:
    drafted, plain = (found["report"] for found in results[run]["runs"])
    kinds = {SCHEMES[name].layer for name in (run.target, run.drafter) if name}
    assert all(drafted["layers"].get(kind, 0) > 0 for kind in kinds)
    more = SCHEMES[run.drafter].layer if run.drafter else ""
    assert not more or drafted["layers"][more] > plain["layers"].get(more, 0)
    assert sum(drafted["attention"].values()) > sum(plain["attention"].values()) > 0
    assert (drafted["native_layers"], drafted["model_runner"]) == ({}, "V2")
