"""Greedy tokens equal Hugging Face's in float32, with chunked prefill, and again from the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, STEP, start

LAYERS = 3
OPERATORS = {
    "qwen3": {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"},
    "llama": {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"},
    "gemma3": {"gemma_rms_norm", "gelu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"},
}


@pytest.fixture(scope="session")
def results(checkpoint: Callable[[str], Path]) -> dict[str, Any]:
    """One engine a family, in parallel; two passes over the same prompts, 64 tokens a step."""
    runs = {family: start(checkpoint(family), STEP, STEP) for family in OPERATORS}
    return {family: run.result() for family, run in runs.items()}


@pytest.mark.parametrize("family", OPERATORS)
def test_tokens_equal_hugging_face(
    family: str, results: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert results[family]["steps"][0]["tokens"] == expected(family)


@pytest.mark.parametrize("family", OPERATORS)
def test_every_operator_ran_in_the_engine_and_no_layer_is_native(family: str, results: dict[str, Any]) -> None:
    report = results[family]["report"]
    assert {key.split(" ")[0] for key in report["counts"]} == OPERATORS[family]
    assert report["native_layers"] == {}
    assert set(report["attention"]) == {"AttentionFLImpl"}
    assert report["failed"] == {}
    assert "layers through fl_dispatch" in results[family]["log"]


def test_calls_are_counted_one_a_layer_and_step(results: dict[str, Any]) -> None:
    counts = results["llama"]["report"]["counts"]
    calls = {key.split(" ")[0]: value for key, value in counts.items()}
    steps, rest = divmod(calls["paged_attention"], LAYERS)
    assert rest == 0
    assert calls["silu_and_mul"] == calls["rotary_embedding"] == calls["kv_cache_write"] == LAYERS * steps
    assert calls["rms_norm"] == (2 * LAYERS + 1) * steps


@pytest.mark.parametrize("family", OPERATORS)
def test_a_pass_from_the_prefix_cache_gives_the_same_tokens(
    family: str, results: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    first, second = results[family]["steps"]
    assert first["cached"] == [0] * len(PROMPTS)
    assert second["cached"] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert second["tokens"] == expected(family)


@pytest.mark.parametrize("family", OPERATORS)
def test_vllm_counts_the_same_hits(family: str, results: dict[str, Any]) -> None:
    metrics = results[family]["metrics"]
    assert metrics["vllm:prefix_cache_hits"] == sum(results[family]["steps"][1]["cached"])
    assert metrics["vllm:prefix_cache_queries"] == 2 * sum(map(len, PROMPTS))
