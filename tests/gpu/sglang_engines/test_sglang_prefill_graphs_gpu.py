"""Prompts in SGLang on a GPU from graphs: tokens and log-probabilities of Hugging Face's network in float32.

SGLang pads a batch to the next number of tokens that it captured, so prompts of most lengths have padding beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_on_gpu import NEUTRAL, OURS, REFERENCES, STEP, TREES, all_is_ours, answered, replayed, start

from running import MAX_TOKENS, expected_tokens, ran, reference_network

pytestmark = pytest.mark.gpu
LENGTHS = (2, 3, 5, 6, 7, 9, 11, 13, 17, 21, 27, 33, 47, 50, 61)
PROMPTS = [[(11 * row + 5 * column) % 400 + 5 for column in range(length)] for row, length in enumerate(LENGTHS)]
"""One at a time; none of them is as long as a captured batch, which has 4, 8, 12, …, 32, 48 or 64 tokens."""
LONG = [[(3 * row + column) % 400 + 5 for column in range(length)] for row, length in enumerate((331, 130, 7, 27))]
"""Together: chunks of several requests, some of which begin in the cache."""
RUNS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    "llama": ("llama", {"page_size": 16}, NEUTRAL),
    "qwen3": ("qwen3", {}, NEUTRAL),
    "qwen3_moe": ("qwen3_moe", {}, NEUTRAL),
    "gemma2": ("gemma2", {"page_size": 16}, NEUTRAL),
    "deepseek_v3": ("deepseek_v3", {}, NEUTRAL),
    "deepseek_v32": ("deepseek_v32", {}, NEUTRAL),
    "mixed chunks": ("qwen3", {"enable_mixed_chunk": True}, NEUTRAL),
    "references": ("llama", {}, REFERENCES),
    "prompts alone": ("qwen3", {"cuda_graph_backend_decode": "disabled"}, NEUTRAL),
    "eager prompts": ("qwen3", {"cuda_graph_backend_prefill": "disabled"}, NEUTRAL),
    "as shipped": ("qwen3", {"dtype": "bfloat16"}, TREES),
}
"""Name → family, arguments of the engine, and variables."""
EXACT = [name for name in RUNS if name != "as shipped"]
REPLAYED = [name for name in RUNS if name != "eager prompts"]
NEAR = 1e-3
ALONE = [{"prompts": [prompt], "max_tokens": 2, "scores": True} for prompt in PROMPTS]
TOGETHER = {"prompts": LONG, "max_tokens": MAX_TOKENS, "scores": True}


@pytest.fixture(scope="module")
def result(checkpoint: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """A run's engine: prompts one at a time, several together twice, then the standard ones."""
    runs = {
        name: start(
            checkpoint(family),
            *ALONE,
            TOGETHER,
            {**TOGETHER, "scores": False},
            STEP,
            engine=engine,
            variables=variables,
        )
        for name, (family, engine, variables) in RUNS.items()
    }
    return lambda name: runs[name].result()


@pytest.fixture(scope="module")
def long_answers(checkpoint: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    return cache(lambda family: expected_tokens(checkpoint(family), LONG))


@pytest.mark.parametrize("name", EXACT)
def test_tokens_equal_hugging_face(
    name: str,
    result: Callable[[str], dict[str, Any]],
    expected: Callable[[str], list[list[int]]],
    long_answers: Callable[[str], list[list[int]]],
) -> None:
    *_, together, again, standard = result(name)["steps"]
    assert together["tokens"] == again["tokens"] == long_answers(RUNS[name][0])
    assert max(again["cached"]) >= 320  # what is left of these prompts is read with the cache before it
    assert standard["tokens"] == expected(RUNS[name][0])


@pytest.mark.parametrize("name", EXACT)
def test_log_probabilities_of_prompts_beside_padding_are_hugging_faces(
    name: str, result: Callable[[str], dict[str, Any]], checkpoint: Callable[[str], Path]
) -> None:
    network = reference_network(checkpoint(RUNS[name][0]), torch.float32)
    *alone, together, _, _ = result(name)["steps"]
    for prompts, step in [*(([prompt], step) for prompt, step in zip(PROMPTS, alone, strict=True)), (LONG, together)]:
        texts, got = answered(prompts, step)
        right = []
        for text in texts:
            with torch.no_grad():
                scores = network(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
            right.append(scores.gather(-1, torch.tensor(text)[1:, None])[:, 0])
        assert float((got - torch.cat(right)).abs().max()) < NEAR, [len(prompt) for prompt in prompts]


@pytest.mark.parametrize("name", REPLAYED)
def test_prompts_replay_graphs(name: str, result: Callable[[str], dict[str, Any]]) -> None:
    found = result(name)
    report = found["report"]
    assert report["prompt_graphs"]["tokens"] == [4, 8, 12, 16, 20, 24, 28, 32, 48, 64]
    assert report["prompt_graphs"]["replays"] >= len(PROMPTS) + (sum(map(len, LONG)) - 2 * len(LONG)) // 64
    assert report["manifest"] is not None
    assert all_is_ours(report)
    if name in ("prompts alone", "references"):
        assert report["graphs"] is None
    else:
        assert replayed(report, MAX_TOKENS)
    if RUNS[name][2] is NEUTRAL:
        attention = {"deepseek_v3": "mla_decode", "deepseek_v32": "mla_sparse"}.get(RUNS[name][0], "paged_attention")
        assert ran(found, attention) == ran(found, "kv_cache_write") == OURS


def test_prompts_are_read_eagerly_where_that_is_asked_for(result: Callable[[str], dict[str, Any]]) -> None:
    report = result("eager prompts")["report"]
    assert report["prompt_graphs"] is None
    assert all_is_ours(report)
    assert replayed(report, MAX_TOKENS)
