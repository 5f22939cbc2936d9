"""Greedy tokens equal Hugging Face's for models with other positions, norms, soft caps and attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, start_features

PASS = {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}}
PAGED = {"kv_cache_write", "paged_attention"}
LLAMA = {"rms_norm", "silu_and_mul", "rotary_embedding"} | PAGED

# family → what is special about it, the layer class that shows it, and the operators that run
MODELS: dict[str, tuple[str, str | None, set[str]]] = {
    "llama_yarn": ("YaRN", "YaRNScalingRotaryEmbedding", LLAMA),
    "phi3": ("LongRoPE on half of each head", "Phi3LongRoPEScaledRotaryEmbedding", LLAMA),
    "gemma2": (
        "soft caps, a window in every other layer, tied embeddings",
        "GemmaRMSNorm",
        {"gemma_rms_norm", "gelu_and_mul", "rotary_embedding"} | PAGED,
    ),
    "bloom": ("ALiBi", "GELU", {"gelu"} | PAGED),
    "deepseek_v3": (
        "latent attention with a low-rank query, YaRN, experts chosen by a biased sigmoid in groups",
        "DeepseekScalingRotaryEmbedding",
        {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "mla_decode", "mla_prefill"}
        | {"grouped_topk", "fused_moe"},
    ),
}


@pytest.fixture(scope="session")
def results(checkpoint: Callable[[str], Path]) -> dict[str, Any]:
    """One engine a family, one after the other in a process; two passes over the same prompts."""
    runs = start_features(*[(checkpoint(family), [PASS, PASS], {}) for family in MODELS]).result()["runs"]
    return dict(zip(MODELS, runs, strict=True))


@pytest.mark.parametrize("position", [0, 1], ids=["first pass", "from the prefix cache"])
@pytest.mark.parametrize("family", MODELS)
def test_tokens_equal_hugging_face(
    family: str, position: int, results: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    outputs = results[family]["steps"][position]
    assert [output["tokens"][0] for output in outputs] == expected(family)
    cached = [(len(prompt) - 1) // 16 * 16 if position else 0 for prompt in PROMPTS]
    assert [output["cached"] for output in outputs] == cached


@pytest.mark.parametrize("family", MODELS)
def test_every_operator_ran_and_no_layer_is_native(family: str, results: dict[str, Any]) -> None:
    _, layer, operators = MODELS[family]
    report = results[family]["report"]
    assert {key.split(" ")[0] for key in report["counts"]} == operators
    assert layer in report["layers"]
    assert report["native_layers"] == {}
    assert report["failed"] == {}
