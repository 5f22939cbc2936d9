"""Drafts of a model, an EAGLE head or a predictor of one more token change no greedy token, and no distribution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engines import MAX_TOKENS, PROMPTS, Runs, start_features

import drafters
from running import reference_network
from sampling import drawn


class Run(NamedTuple):
    """Tokens that are drafted, the way they are chosen, and whether the models are compiled."""

    tokens: int
    sampled: str = "greedy"
    compiled: bool = False


RUNS = {
    "draft_model": Run(3, "probabilistic"),
    "eagle": Run(3, "greedy", compiled=True),
    "eagle3": Run(3, "probabilistic"),
    "mtp": Run(1),
    "several predictors": Run(3, "probabilistic"),
}
METHODS = {"several predictors": "mtp"}
"""vLLM's name of a way to draft, where it differs."""
DRAWN = drawn(tuple(RUNS), 2, "who drafts")
SAMPLES = 1500
SPREAD = {"n": SAMPLES, "temperature": drafters.TEMPERATURE, "top_k": drafters.TOP, "seed": 3, "max_tokens": 2}

each = pytest.mark.parametrize("method", DRAWN)


@pytest.fixture(scope="module")
def models(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Method → the target and what drafts for it."""
    return drafters.pairs(checkpoint, tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def results(models: dict[str, tuple[Path, Path]]) -> Runs:
    """The engine with drafts, and the one without."""

    def begin(method: str) -> Any:
        (target, drafter), run = models[method], RUNS[method]
        steps = [
            {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}},
            {"do": "generate", "prompts": drafters.TURNS, "sampling": {"max_tokens": drafters.LONG}},
            {"do": "metrics", "contains": "spec_decode"},
            {"do": "generate", "prompts": PROMPTS[:1], "sampling": SPREAD},
        ]
        how = {"method": METHODS.get(method, method), "model": str(drafter), "num_speculative_tokens": run.tokens}
        engine = {"enforce_eager": not run.compiled, "max_num_seqs": 64, "max_num_batched_tokens": 256}
        drafted = {"speculative_config": {**how, "draft_sample_method": run.sampled}, **engine}
        return start_features((target, steps, drafted), (target, steps[1:2], {}))

    return Runs({method: begin(method) for method in DRAWN})


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


@each
def test_greedy_tokens_equal_hugging_face(
    method: str, results: Runs, expected: Callable[[str], list[list[int]]]
) -> None:
    drafted, _ = results[method]["runs"]
    assert _tokens(drafted["steps"][0]) == expected(drafters.TARGETS[method])


@each
def test_drafts_are_accepted_and_rejected_and_change_no_token(method: str, results: Runs) -> None:
    drafted, plain = results[method]["runs"]
    assert _tokens(drafted["steps"][1]) == _tokens(plain["steps"][0])
    counted = drafted["steps"][2]
    accepted, made = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 0 < accepted < made


@each
def test_sampled_tokens_keep_the_targets_distribution(
    method: str, results: Runs, models: dict[str, tuple[Path, Path]]
) -> None:
    network = reference_network(models[method][0], torch.float32)
    sampled = results[method]["runs"][0]["steps"][3][0]["tokens"]
    assert len(sampled) == SAMPLES
    drafters.check_pairs(network, PROMPTS[0], sampled)


@each
def test_the_drafter_runs_our_operators_too(method: str, results: Runs) -> None:
    drafted, plain = (run["report"] for run in results[method]["runs"])
    layers = [sum(report["attention"].values()) for report in (drafted, plain)]
    assert layers[0] > layers[1] > 0
    assert drafted["native_layers"] == {}
    assert drafted["model_runner"] == "V2"
    assert (drafted["compiled"] is not None) == RUNS[method].compiled
