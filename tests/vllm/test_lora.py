"""LoRA adapters give the tokens of the merged weights, alone and mixed in one batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import variants
from engines import MAX_TOKENS, PROMPTS, expected_tokens, start_features

SHORT = {"max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def adapters(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [variants.adapter(checkpoint("qwen3"), folder / name, seed) for name, seed in (("one", 1), ("two", 2))]


@pytest.fixture(scope="module")
def merged_tokens(
    checkpoint: Callable[[str], Path], adapters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> list[list[list[int]]]:
    """Hugging Face's tokens of the weights merged with each adapter."""
    folder = tmp_path_factory.mktemp("merged")
    return [expected_tokens(variants.merged(checkpoint("qwen3"), path, folder / path.name)) for path in adapters]


@pytest.fixture(scope="module")
def run(checkpoint: Callable[[str], Path], adapters: list[Path]) -> dict[str, Any]:
    one, two = map(str, adapters)
    shared = PROMPTS[2]
    steps = [
        {"do": "generate", "prompts": PROMPTS, "sampling": SHORT, "lora": [one] * len(PROMPTS)},
        {"do": "generate", "prompts": PROMPTS * 3, "sampling": SHORT, "lora": [one, two, None] * len(PROMPTS)},
        {"do": "reset_prefix_cache"},
        {"do": "generate", "prompts": [shared], "sampling": SHORT, "lora": [one]},
        {"do": "generate", "prompts": [shared] * 2, "sampling": SHORT, "lora": [one, two]},
        {"do": "generate", "prompts": [shared], "sampling": SHORT},
    ]
    engine = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    return start_features((checkpoint("qwen3"), steps, engine)).result()["runs"][0]


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


def test_an_adapter_gives_the_tokens_of_the_merged_weights(
    run: dict[str, Any], merged_tokens: list[list[list[int]]], expected: Callable[[str], list[list[int]]]
) -> None:
    assert _tokens(run["steps"][0]) == merged_tokens[0]
    assert merged_tokens[0] != merged_tokens[1]
    assert expected("qwen3") not in merged_tokens


def test_two_adapters_and_none_mix_in_one_batch(
    run: dict[str, Any], merged_tokens: list[list[list[int]]], expected: Callable[[str], list[list[int]]]
) -> None:
    weights = [*merged_tokens, expected("qwen3")]
    found = _tokens(run["steps"][1])
    wrong = {index: tokens for index, tokens in enumerate(found) if tokens != weights[index % 3][index % len(PROMPTS)]}
    assert wrong == {}


def test_a_prefix_is_shared_within_an_adapter_only(run: dict[str, Any]) -> None:
    _, _, _, first, both, plain = run["steps"]
    assert first[0]["cached"] == 0
    assert [output["cached"] > 0 for output in both] == [True, False]
    assert plain[0]["cached"] == 0


def test_our_operators_ran_around_the_adapted_projections(run: dict[str, Any]) -> None:
    operators = {key.split(" ")[0] for key in run["report"]["counts"]}
    assert {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"} <= operators
    assert run["report"]["native_layers"] == {}
