"""Drafts beside quantized weights, the target's or the drafter's, change no greedy token, and no distribution.

As :mod:`test_drafts`. The tokens are those of the same engine without drafts, about which :mod:`test_quantized` is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import MAX_TOKENS, PROMPTS, Runs, start_features

import drafters
import quantized_checkpoints as checkpoints
from fl_dispatch.cli.checkpoints import build_checkpoint
from quantized_checkpoints import SCHEMES
from quantized_mixture import LATENT
from quantized_network import network
from sampling import drawn
from variants import unsure

pytestmark = pytest.mark.engine


class Run(NamedTuple):
    """Who drafts, the schemes of the target and of the drafter (empty: not quantized), and the drafted tokens."""

    method: str
    target: str
    drafter: str
    tokens: int = 3

    def __str__(self) -> str:
        return f"{self.method}, {self.drafter or 'plain'} for {self.target or 'plain'}"


RUNS = (
    Run("draft_model", "awq", "compressed-tensors W8A16 fp8"),
    Run("draft_model", "", "compressed-tensors W4A16"),
    Run("eagle", "gptq", ""),
    Run("eagle3", "compressed-tensors W8A16 fp8", ""),
    Run("eagle3", "fp8", ""),
    Run("mtp", "fp8, blocks of 128", "fp8, blocks of 128", 1),
)
DRAWN = drawn(RUNS, 2, "quantized, who drafts")
each = pytest.mark.parametrize("run", DRAWN, ids=str)
SAMPLES = 1500
SPREAD = {"n": SAMPLES, "temperature": drafters.TEMPERATURE, "top_k": drafters.TOP, "seed": 3, "max_tokens": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Run, tuple[Path, Path, Path]]:
    """The target as it was before, as it is served, and what drafts for it."""
    folder = tmp_path_factory.mktemp("drafters")

    def build(family: str) -> Path:
        sizes = LATENT if family == "deepseek_v3" else {}
        return unsure(build_checkpoint(family, folder / f"{family} sure", **sizes), folder / family)

    plain = {family: build(family) for family in {drafters.TARGETS[run.method] for run in DRAWN}}
    makers: dict[str, Callable[[Path, Path], Path]] = {
        "draft_model": drafters.noisy,
        "eagle": drafters.eagle,
        "eagle3": drafters.eagle3,
        "mtp": drafters.with_mtp,
    }

    def quantized(scheme: str, model: Path, target: Path) -> Path:
        return checkpoints.write_checkpoint(target, SCHEMES[scheme], model=model) if scheme else model

    def pair(run: Run, place: Path) -> tuple[Path, Path, Path]:
        place.mkdir()
        model = plain[drafters.TARGETS[run.method]]
        drafter = quantized(run.drafter, makers[run.method](model, place / "plain drafter"), place / "drafter")
        return model, drafter if run.method == "mtp" else quantized(run.target, model, place / "target"), drafter

    return {run: pair(run, folder / str(index)) for index, run in enumerate(DRAWN)}


@pytest.fixture(scope="module")
def results(models: dict[Run, tuple[Path, Path, Path]]) -> Runs:
    """The engine with drafts, and the one without."""

    def begin(run: Run) -> Any:
        _, target, drafter = models[run]
        steps = [
            {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}},
            {"do": "generate", "prompts": drafters.TURNS, "sampling": {"max_tokens": drafters.LONG}},
            {"do": "metrics", "contains": "spec_decode"},
            {"do": "generate", "prompts": PROMPTS[:1], "sampling": SPREAD},
        ]
        how = {"method": run.method, "model": str(drafter), "num_speculative_tokens": run.tokens}
        engine = {"max_num_seqs": 64, "max_num_batched_tokens": 256}
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
    accepted, made = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 0 < accepted < made


@each
def test_sampled_tokens_keep_the_dequantized_networks_distribution(
    run: Run, results: Runs, models: dict[Run, tuple[Path, Path, Path]]
) -> None:
    made = network(SCHEMES[run.target] if run.target else None, model=models[run][0])
    sampled = results[run]["runs"][0]["steps"][3][0]["tokens"]
    assert len(sampled) == SAMPLES
    drafters.check_pairs(made, PROMPTS[0], sampled)


@each
def test_both_models_run_our_products(run: Run, results: Runs) -> None:
    drafted, plain = (found["report"] for found in results[run]["runs"])
    kinds = {SCHEMES[name].layer for name in (run.target, run.drafter) if name}
    assert all(drafted["layers"].get(kind, 0) > 0 for kind in kinds)
    more = SCHEMES[run.drafter].layer if run.drafter else ""
    assert not more or drafted["layers"][more] > plain["layers"].get(more, 0)
    assert sum(drafted["attention"].values()) > sum(plain["attention"].values()) > 0
    assert (drafted["native_layers"], drafted["model_runner"]) == ({}, "V2")
