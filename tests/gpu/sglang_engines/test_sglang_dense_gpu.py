"""Dense models in SGLang on a GPU, from graphs: tokens and log-probabilities of Hugging Face's network in float32.

One of them has windows, logits with a soft cap, and norms of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_on_gpu import NEUTRAL, OURS, STEP, all_is_ours, answered, replayed, start

from running import MAX_TOKENS, PROMPTS, ran, reference_network

pytestmark = pytest.mark.gpu
RUNS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3": ("rms_norm", {}),
    "llama": ("rms_norm", {"page_size": 16}),
    "gemma2": ("gemma_rms_norm", {"page_size": 16}),
}
"""Family → the operator of its norms, and arguments of the engine."""
NEAR = 1e-3
each = pytest.mark.parametrize("family", RUNS)


@pytest.fixture(scope="module")
def result(checkpoint: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    runs = {
        family: start(checkpoint(family), {**STEP, "scores": True}, STEP, engine=engine, variables=NEUTRAL)
        for family, (_, engine) in RUNS.items()
    }
    return lambda family: runs[family].result()


@each
def test_tokens_equal_hugging_face_twice(
    family: str, result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    first, again = result(family)["steps"]
    assert first["tokens"] == again["tokens"] == expected(family)
    assert max(again["cached"]) >= 320


@each
def test_log_probabilities_are_hugging_faces(
    family: str, result: Callable[[str], dict[str, Any]], checkpoint: Callable[[str], Path]
) -> None:
    """Those of prompts, which are read in chunks, and of the tokens that graphs give."""
    texts, got = answered(PROMPTS, result(family)["steps"][0])
    network, right = reference_network(checkpoint(family), torch.float32), []
    for text in texts:
        with torch.no_grad():
            scores = network(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        right.append(scores.gather(-1, torch.tensor(text)[1:, None])[:, 0])
    assert float((got - torch.cat(right)).abs().max()) < NEAR


@each
def test_layers_are_ours_and_graphs_held_our_kernels(family: str, result: Callable[[str], dict[str, Any]]) -> None:
    found = result(family)
    assert all(ran(found, operator) == OURS for operator in (RUNS[family][0], "kv_cache_write", "paged_attention"))
    assert all_is_ours(found["report"])
    assert replayed(found["report"], 2 * (MAX_TOKENS - 1))
