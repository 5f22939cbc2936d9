"""Graphs of prompts in engines on a CPU, where pieces are recorded and replayed: right tokens, from padded batches too.

The graph is a stand-in (``recorded_graphs``); the runner, its breaks and its padding are SGLang's. Memory that nobody
has written holds NaN. ``test_sglang_graphs.py`` has the hooks, ``test_sglang_prefill_graphs_gpu.py`` a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import STEP, answered, distribution, start

from running import PROMPTS, ran, reference_network

PIECES = {"cuda_graph_backend_prefill": "breakable"}
PRODUCTS = "linear=impl:vendor.products|reference"  # PyTorch's product would stay SGLang's
DENSE = f"{PRODUCTS};fused_moe=impl:vendor.dense"
RUNS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "llama": ("llama", {"page_size": 16}, PRODUCTS),
    "qwen3": ("qwen3", {}, PRODUCTS),
    "gemma2": ("gemma2", {"page_size": 16}, PRODUCTS),
    "experts": ("qwen3_moe", {}, DENSE),
    "latent attention": ("deepseek_v3", {}, DENSE),
    "sparse latent attention": ("deepseek_v32", {}, DENSE),
    "shared lists": ("glm_moe_dsa", {}, DENSE),
    "experts that wait": ("qwen3_moe", {}, PRODUCTS),
    "not asked for": ("qwen3", {"cuda_graph_backend_prefill": "disabled"}, PRODUCTS),
}
"""Name → family, arguments of the engine, and what runs products and experts."""
EAGER = {
    "experts that wait": "no graphs of prompts are captured, because none can hold 'reference.torch' of 'fused_moe'",
    "not asked for": "Disable prefill CUDA graph because",
}
"""Name → what the log says."""
ATTENTION = {"deepseek_v3": "mla_decode", "deepseek_v32": "mla_sparse", "glm_moe_dsa": "mla_sparse"}
"""Family → the operator of its attention, if that is latent."""
CAPTURED = [name for name in RUNS if name not in EAGER]
NEAR = 1e-3


@pytest.fixture(scope="module")
def result(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """A run's engine, which gets the same prompts twice."""
    variables = {
        "PYTHONPATH": distribution(tmp_path_factory.mktemp("plugin"), "recorded_graphs:load"),
        "SGLANG_FL_PLUGIN_MODULES": "linear_plugin,dense_experts,unwritten_memory",
        "SGLANG_FL_PREFER": "reference",
    }
    asked = {**STEP, "scores": True}
    runs = {}
    for name, (family, engine, orders) in RUNS.items():
        chosen = {**variables, "SGLANG_FL_PER_OP": orders}
        runs[name] = start(checkpoint(family), asked, STEP, engine={**PIECES, **engine}, variables=chosen)
    return lambda name: runs[name].result()


@pytest.mark.parametrize("name", RUNS)
def test_tokens_equal_hugging_face_twice(
    name: str, result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    first, again = result(name)["steps"]
    assert first["tokens"] == again["tokens"] == expected(RUNS[name][0])


@pytest.mark.parametrize("name", CAPTURED)
def test_log_probabilities_of_prompts_are_hugging_faces(
    name: str, result: Callable[[str], dict[str, Any]], checkpoint: Callable[[str], Path]
) -> None:
    texts, got = answered(PROMPTS, result(name)["steps"][0])
    network, right = reference_network(checkpoint(RUNS[name][0]), torch.float32), []
    for text in texts:
        with torch.no_grad():
            scores = network(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        right.append(scores.gather(-1, torch.tensor(text)[1:, None])[:, 0])
    exact = torch.cat(right)
    assert float(((got - exact) / exact.abs().clamp(min=1)).abs().max()) < NEAR  # GLM-5 has scores of -378 here


@pytest.mark.parametrize("name", CAPTURED)
def test_prompts_replay_graphs_of_what_was_frozen(name: str, result: Callable[[str], dict[str, Any]]) -> None:
    found = result(name)
    report = found["report"]
    assert report["prompt_graphs"]["tokens"] == [4, 8, 12, 16, 20, 24, 28, 32, 48, 64]
    assert report["prompt_graphs"]["replays"] >= sum(map(len, PROMPTS)) // 64
    assert report["manifest"] is not None
    assert report["graphs"] is None  # a CPU captures no decoding
    attention = ATTENTION.get(RUNS[name][0], "paged_attention")
    assert ran(found, attention) == ran(found, "kv_cache_write") == {"reference.torch"}  # between pieces
    assert ran(found, "linear") == {"vendor.products"}
    assert report["undispatched"] == {}
    assert not any(report[name] for name in ("failed", "native_layers", "fallen_through"))


@pytest.mark.parametrize("name", EAGER)
def test_nothing_is_captured_where_no_graph_can_hold_it_or_nobody_asks(
    name: str, result: Callable[[str], dict[str, Any]]
) -> None:
    report = result(name)["report"]
    assert report["prompt_graphs"] is report["manifest"] is None
    assert EAGER[name] in result(name)["log"]
    assert report["undispatched"] == {}
