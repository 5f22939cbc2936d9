"""Drafts beside quantized weights under SGLang, the target's or the drafter's, change no greedy token.

The tokens are those of the same engine without drafts, about which :mod:`test_sglang_quantized` is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import STEP, start

import drafters
from quantized_checkpoints import SCHEMES
from quantized_drafts import Models, Run, models
from quantized_network import network
from running import MAX_TOKENS, PROMPTS
from sampling import drawn
from variants import WEIGHTS

pytest.importorskip("sglang")
pytestmark = pytest.mark.engine

ALGORITHMS = {"draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}
RUNS = (
    Run("draft_model", "awq", "compressed-tensors W4A16"),
    Run("draft_model", "", "gptq"),
    Run("eagle", "compressed-tensors W8A16 fp8", ""),
    Run("eagle3", "fp8", ""),
)
DRAWN = drawn(RUNS, 1, "quantized, who drafts under SGLang")
each = pytest.mark.parametrize("run", DRAWN, ids=str)
LONG = {"prompts": drafters.TURNS, "max_tokens": drafters.LONG}
SAMPLES = 800
SPREAD = {"temperature": drafters.TEMPERATURE, "top_k": drafters.TOP}


def _said(model: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    """Have a head say what SGLang reads: further tensors, and further words in its configuration."""
    path, weights = model / "config.json", model / WEIGHTS
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    save_file({**load_file(weights), **tensors}, weights, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[Run, Models]:
    folder = tmp_path_factory.mktemp("drafters")
    found = {run: models(run, folder / str(index)) for index, run in enumerate(DRAWN)}
    for run, (plain, _, drafter) in found.items():
        if run.method == "eagle":
            size = json.loads((plain / "config.json").read_text())["hidden_size"]
            _said(drafter, {"fc.bias": torch.zeros(size)}, architectures=["LlamaForCausalLMEagle"])
        elif run.method == "eagle3":
            _said(drafter, {}, draft_vocab_size=None)
    return found


@pytest.fixture(scope="module")
def results(made: dict[Run, Models]) -> dict[Run, list[Any]]:
    """The engine with drafts, and the one without."""

    def begin(run: Run) -> list[Any]:
        drafted = {
            "speculative_algorithm": ALGORITHMS[run.method],
            "speculative_draft_model_path": str(made[run].drafter),
            **({} if run.drafter or not run.target else {"speculative_draft_model_quantization": "unquant"}),
        }
        common = {"max_running_requests": 64, "max_total_tokens": 8192, "random_seed": 3}
        spread = {"prompts": PROMPTS[:1] * SAMPLES, "max_tokens": 2, "sampling": SPREAD}
        target = made[run].target
        return [
            start(target, STEP, LONG, spread, engine={**common, **drafted}),
            start(target, STEP, LONG, engine=common),
        ]

    return {run: begin(run) for run in DRAWN}


@each
def test_greedy_tokens_are_those_without_drafts(run: Run, results: dict[Run, list[Any]]) -> None:
    drafted, plain = (one.result()["steps"] for one in results[run])
    assert [step["tokens"] for step in drafted[:2]] == [step["tokens"] for step in plain]
    assert {len(tokens) for tokens in drafted[0]["tokens"]} == {MAX_TOKENS}


@each
def test_drafts_are_accepted_and_rejected(run: Run, results: dict[Run, list[Any]]) -> None:
    steps = results[run][0].result()["steps"][:2]
    checked, right = (sum(pair[part] for step in steps for pair in step["drafts"]) for part in (0, 1))
    assert 0 < right < 3 * checked


@each
def test_sampled_tokens_keep_the_dequantized_networks_distribution(
    run: Run, results: dict[Run, list[Any]], made: dict[Run, Models]
) -> None:
    right = network(SCHEMES[run.target] if run.target else None, model=made[run].plain)
    sampled = results[run][0].result()["steps"][2]["tokens"]
    assert len(sampled) == SAMPLES
    drafters.check_pairs(right, PROMPTS[0], sampled)


@each
def test_both_models_run_our_products(run: Run, results: dict[Run, list[Any]]) -> None:
    drafted, plain = (one.result()["report"] for one in results[run])

    def calls(report: dict[str, Any], scheme: str) -> int:
        operator = SCHEMES[scheme].operators[-1]
        return sum(count for name, count in report["counts"].items() if name.startswith(f"{operator} "))

    assert not run.target or calls(drafted, run.target) > 0
    assert not run.drafter or calls(drafted, run.drafter) > calls(plain, run.drafter)
    assert drafted["native_layers"] == drafted["drafter"]["native_layers"] == {}
