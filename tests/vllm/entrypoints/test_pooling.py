"""Embeddings equal Hugging Face's hidden states: a decoder's last token, and an encoder without a KV cache.

So do classes of texts and of tokens, and the scores of a cross-encoder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PROMPTS, end, environment, serve_command, start_features, wait_until_served

import variants
from processes import free_port

TOLERANCE = 1e-5
LAYERS, LABELS = 3, 3
QUERY, DOCUMENTS = "river stone", ["the river runs", "cold white snow on the hill"]
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
    folder = tmp_path_factory.mktemp("pooling")
    return {
        "decoder": checkpoint("qwen3"),
        "encoder": variants.encoder(folder / "bert"),
        "classifier": variants.classifier(checkpoint("qwen3"), folder / "classifier", LABELS),
        "cross-encoder": variants.encoder(folder / "cross", "BertForSequenceClassification", num_labels=1),
        "tagger": variants.encoder(folder / "tagger", "BertForTokenClassification", num_labels=LABELS),
    }


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], distribution: str) -> dict[str, Any]:
    """One process; each model embeds the prompts twice, together and one by one."""
    both = [{"do": "embed", "prompts": PROMPTS}, *({"do": "embed", "prompts": [prompt]} for prompt in PROMPTS)]
    processor = {"do": "encode_plugin", "data": {"texts": [WORDS, "hello"]}}
    pooling = {"runner": "pooling"}
    whole = {**pooling, "max_num_batched_tokens": 512}  # an encoder's prompt is not divided
    started = start_features(
        (models["decoder"], [*both, processor], {**pooling, "io_processor_plugin": "shape"}),
        (models["encoder"], both, whole),
        (models["classifier"], [{"do": "classify", "prompts": PROMPTS}], pooling),
        (models["cross-encoder"], [{"do": "score", "query": QUERY, "documents": DOCUMENTS}], whole),
        (models["tagger"], [{"do": "token_classify", "prompts": PROMPTS}], whole),
        PYTHONPATH=distribution,
    )
    return dict(zip(models, started.result()["runs"], strict=True))


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


def test_an_io_processor_runs_behind_the_http_server_too(
    models: dict[str, Path], distribution: str, tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path / "log.txt"
    command = [sys.executable, *serve_command(str(models["decoder"])), "--runner", "pooling", "--dtype", "float32"]
    command += ["--io-processor-plugin", "shape", "--max-model-len", "512", "--kv-cache-memory-bytes", "67108864"]
    variables = environment(PYTHONPATH=distribution, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)],
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until_served(f"http://127.0.0.1:{port}", [server], [log])
        body = json.dumps({"model": str(models["decoder"]), "data": {"texts": [WORDS, "hello", "hello"]}}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/pooling", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read())["data"] == {"texts": 3, "dimensions": [64, 64, 64]}
    finally:
        end(server)
    assert "layers through fl_dispatch" in log.read_text()


# -- classes and scores -----------------------------------------------------------------------------------------------


def _network(kind: str, model: Path) -> Any:
    import transformers

    return getattr(transformers, kind).from_pretrained(model, dtype=torch.float32).eval()


def test_classes_of_texts_equal_hugging_face(runs: dict[str, Any], models: dict[str, Path]) -> None:
    network = _network("Qwen3ForSequenceClassification", models["classifier"])
    with torch.no_grad():
        expected = torch.stack([network(torch.tensor([prompt])).logits[0].softmax(-1) for prompt in PROMPTS])
    found = torch.tensor(runs["classifier"]["steps"][0])
    assert (found - expected).abs().max() < TOLERANCE
    assert (expected[0] - expected[1]).abs().max() > 0.01


def test_classes_of_tokens_equal_hugging_face(runs: dict[str, Any], models: dict[str, Path]) -> None:
    network = _network("BertForTokenClassification", models["tagger"])
    for prompt, found in zip(PROMPTS, runs["tagger"]["steps"][0], strict=True):
        with torch.no_grad():
            expected = network(torch.tensor([prompt])).logits[0].softmax(-1)
        assert (torch.tensor(found) - expected).abs().max() < TOLERANCE


def test_the_scores_of_a_cross_encoder_equal_hugging_face(runs: dict[str, Any], models: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    network = _network("BertForSequenceClassification", models["cross-encoder"])
    tokenizer = AutoTokenizer.from_pretrained(models["cross-encoder"])
    for document, found in zip(DOCUMENTS, runs["cross-encoder"]["steps"][0], strict=True):
        with torch.no_grad():
            expected = network(**tokenizer(QUERY, document, return_tensors="pt")).logits.sigmoid().item()
        assert abs(found - expected) < TOLERANCE
    assert abs(runs["cross-encoder"]["steps"][0][0] - runs["cross-encoder"]["steps"][0][1]) > 0.001


@pytest.mark.parametrize("kind", ["classifier", "cross-encoder", "tagger"])
def test_our_attention_served_them(kind: str, runs: dict[str, Any]) -> None:
    report = runs[kind]["report"]
    assert report["attention"] == {"AttentionFLImpl": LAYERS}
    assert any(key.startswith("paged_attention ") for key in report["counts"])
