"""LoRA on a GPU with captured graphs: two adapters and none in one batch give the tokens of the merged weights.

With drafts the tokens are those without.
"""

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

from engines import MAX_TOKENS, PROMPTS, expected_tokens, ran, start_features

import variants
from fl_dispatch.cli.checkpoints import build_checkpoint

pytestmark = pytest.mark.gpu
SHORT = {"max_tokens": MAX_TOKENS}
SIZES = [1, 2, 4, 8, 16]
LONG = PROMPTS[1]
"""A prompt with more tokens than the largest graph has."""
ENGINE = {
    "enforce_eager": False,
    "gpu_memory_utilization": 0.1,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 128,
    "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": SIZES},
}
NEUTRAL = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
RUNS: Mapping[str, Mapping[str, str]] = {
    "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1", **NEUTRAL},
    "V1": {"VLLM_USE_V2_MODEL_RUNNER": "0", **NEUTRAL},
}
LOOK_UP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
TURNS = [prompt[:6] * 4 for prompt in PROMPTS[:3]]
LONG_ANSWER = {"max_tokens": 48}
LAYERS, PRODUCTS = 3, 4
"""The checkpoint's layers, and the products of each that adapters change."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return build_checkpoint("qwen3", folder / "qwen3")


@pytest.fixture(scope="module")
def adapters(model: Path, folder: Path) -> dict[str, Path]:
    """Three adapters, one of which changes the projection to the vocabulary too."""
    adapted = {"one": variants.ADAPTED, "two": variants.ADAPTED, "head": (*variants.ADAPTED, "lm_head")}
    return {name: variants.adapter(model, folder / name, seed, adapted[name]) for seed, name in enumerate(adapted)}


@pytest.fixture(scope="module")
def wanted(model: Path, folder: Path, adapters: dict[str, Path]) -> Callable[[str | None], list[list[int]]]:
    """Hugging Face's tokens of the weights merged with an adapter."""

    def tokens(name: str | None) -> list[list[int]]:
        if name is None:
            return expected_tokens(model)
        return expected_tokens(variants.merged(model, adapters[name], folder / f"merged {name}"))

    return cache(tokens)


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, model: Path, adapters: dict[str, Path]) -> dict[str, Any]:
    one, two, head = (str(adapters[name]) for name in ("one", "two", "head"))
    mixed = [one, two, None] * len(PROMPTS)
    steps = [
        {"do": "generate", "prompts": PROMPTS * 3, "sampling": SHORT, "lora": mixed},
        {"do": "generate", "prompts": PROMPTS, "sampling": SHORT, "lora": [head] * len(PROMPTS)},
        {"do": "generate", "prompts": PROMPTS, "sampling": SHORT},
        {"do": "reset_prefix_cache"},
        {"do": "rpc", "method": "fl_set_counting", "args": [True]},
        {"do": "generate", "prompts": [LONG], "sampling": SHORT, "lora": [two]},
    ]
    answer = start_features((model, steps, ENGINE), **RUNS[request.param]).result()
    (found,) = answer["runs"]
    assert found["report"]["model_runner"] == request.param
    return {**found, "log": answer["log"]}


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


def test_adapters_and_none_in_one_batch_give_the_tokens_of_the_merged_weights(
    run: dict[str, Any], wanted: Callable[[str | None], list[list[int]]]
) -> None:
    weights = [wanted("one"), wanted("two"), wanted(None)]
    found = _tokens(run["steps"][0])
    assert found == [weights[index % 3][index % len(PROMPTS)] for index in range(len(found))]


def test_another_adapter_takes_the_place_of_one_and_changes_the_logits_too(
    run: dict[str, Any], wanted: Callable[[str | None], list[list[int]]]
) -> None:
    assert _tokens(run["steps"][1]) == wanted("head")
    assert _tokens(run["steps"][2]) == wanted(None)


def test_our_kernels_are_in_graphs_that_are_replayed(
    run: dict[str, Any], wanted: Callable[[str | None], list[list[int]]]
) -> None:
    assert _tokens(run["steps"][5]) == [wanted("two")[1]]
    assert ran(run, "lora_shrink") == ran(run, "lora_expand") == {"default.triton"}
    calls = sum(count for key, count in run["report"]["counts"].items() if key.split(" ")[0] == "lora_shrink")
    # The prompt is longer than a graph, so it makes calls; each of the other steps would make as many.
    assert LAYERS * PRODUCTS <= calls < 3 * LAYERS * PRODUCTS < MAX_TOKENS * LAYERS * PRODUCTS
    assert run["report"]["compiled"]["graphs"] + run["report"]["compiled"]["loaded"] >= 1
    assert run["report"]["failed"] == {}
    assert run["report"]["native_layers"] == {}


def test_nothing_is_compiled_while_it_serves(run: dict[str, Any]) -> None:
    assert "during inference: " not in run["log"]


def test_drafts_change_no_token_of_an_adapter(model: Path, adapters: dict[str, Path]) -> None:
    lora = [str(adapters["head"]), None, str(adapters["one"])] * 2
    steps = [
        {"do": "generate", "prompts": TURNS * 2, "sampling": LONG_ANSWER, "lora": lora},
        {"do": "metrics", "contains": "spec_decode"},
    ]
    runs = (model, steps, {**ENGINE, "speculative_config": LOOK_UP}), (model, steps, ENGINE)
    drafted, plain = start_features(*runs, **RUNS["V2"]).result()["runs"]
    assert drafted["report"]["model_runner"] == "V2"
    assert _tokens(drafted["steps"][0]) == _tokens(plain["steps"][0])
    accepted, made = (drafted["steps"][1][f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 0 < accepted < made
    assert drafted["report"]["failed"] == {}
