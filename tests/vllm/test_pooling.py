"""Embeddings equal Hugging Face's hidden states: a decoder's last token, and an encoder without a KV cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PROMPTS, environment, start_features

import variants

TOLERANCE = 1e-5
LAYERS = 3
WORDS = "the river runs under the stone"


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A distribution with an IO processor, as a PYTHONPATH."""
    folder = tmp_path_factory.mktemp("distribution")
    info = folder / "fl_io-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fl-io\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.io_processor_plugins]\nshape = io_processor:register\n")
    return os.pathsep.join((str(folder), environment()["PYTHONPATH"]))


@pytest.fixture(scope="module")
def models(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"decoder": checkpoint("qwen3"), "encoder": variants.encoder(tmp_path_factory.mktemp("encoder") / "bert")}


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], distribution: str) -> dict[str, Any]:
    """One process; each model embeds the prompts twice, together and one by one."""
    both = [{"do": "embed", "prompts": PROMPTS}, *({"do": "embed", "prompts": [prompt]} for prompt in PROMPTS)]
    processor = {"do": "encode_plugin", "data": {"texts": [WORDS, "hello"]}}
    pooling = {"runner": "pooling"}
    started = start_features(
        (models["decoder"], [*both, processor], {**pooling, "io_processor_plugin": "shape"}),
        (models["encoder"], both, {**pooling, "max_num_batched_tokens": 512}),
        PYTHONPATH=distribution,
    )
    return dict(zip(("decoder", "encoder"), started.result()["runs"], strict=True))


def _hidden(model: Path, prompt: list[int], token: int) -> torch.Tensor:
    from transformers import AutoModel

    network = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = network(torch.tensor([prompt])).last_hidden_state[0, token]
    return torch.nn.functional.normalize(hidden, dim=0)


@pytest.mark.parametrize(("kind", "token"), [("decoder", -1), ("encoder", 0)])
@pytest.mark.parametrize("together", [True, False])
def test_embeddings_equal_hugging_face(
    kind: str, token: int, together: bool, runs: dict[str, Any], models: dict[str, Path]
) -> None:
    whole, *single = runs[kind]["steps"][: 1 + len(PROMPTS)]
    found = whole if together else [one[0] for one in single]
    expected = torch.stack([_hidden(models[kind], prompt, token) for prompt in PROMPTS])
    assert (torch.tensor(found) - expected).abs().max() < TOLERANCE
    assert (expected[0] - expected[1]).abs().max() > 0.01  # prompts are told apart


def test_both_models_have_the_runner_that_vllm_prefers(runs: dict[str, Any]) -> None:
    assert {run["report"]["model_runner"] for run in runs.values()} == {"V2"}


def test_an_encoder_attends_through_our_operator_and_writes_no_cache(runs: dict[str, Any]) -> None:
    report = runs["encoder"]["report"]
    calls = {key.split(" ")[0]: value for key, value in report["counts"].items()}
    assert "kv_cache_write" not in calls
    assert calls["paged_attention"] % LAYERS == 0
    assert report["attention"] == {"AttentionFLImpl": LAYERS}


def test_an_io_processor_runs_beside_us(runs: dict[str, Any]) -> None:
    assert runs["decoder"]["steps"][-1] == {"texts": 2, "dimensions": [64, 64]}
    assert runs["decoder"]["report"]["layers"]["RMSNorm"] > 0
