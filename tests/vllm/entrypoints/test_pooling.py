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

import distributions
import variants
from host_engines import Served, ran
from pooled import LABELS, Pooling
from processes import free_port

TOLERANCE = 1e-5
LAYERS = 3
WHOLE = {"max_num_batched_tokens": 512}
"""An encoder's prompt is not divided."""
QUERY, DOCUMENTS = "river stone", ["the river runs", "cold white snow on the hill"]
WORDS = "the river runs under the stone"


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A distribution with an IO processor, as a PYTHONPATH."""
    entries = "[vllm.io_processor_plugins]\nshape = io_processor:register\n"
    folder = distributions.install(tmp_path_factory.mktemp("distribution"), "fl-io", entries)
    return os.pathsep.join((str(folder), environment()["PYTHONPATH"]))


@pytest.mark.engine
class TestPooling(Pooling):
    ENGINE = {"runner": "pooling"}
    WHOLE = WHOLE
    PROBABILITIES = True
    TOLERANCE = TOLERANCE

    def test_the_runner_is_the_one_that_vllm_prefers(self, kind: str, served: Callable[[str], Served]) -> None:
        assert served(kind).reports[0]["model_runner"] == "V2"

    def test_all_attention_is_ours_and_an_encoders_writes_no_cache(
        self, kind: str, served: Callable[[str], Served]
    ) -> None:
        (report,) = served(kind).reports
        assert report["attention"] == {"AttentionFLImpl": LAYERS}
        if kind == "encoder":
            assert "kv_cache_write" not in ran(report)
            calls = sum(count for name, count in report["counts"].items() if name.split()[0] == "paged_attention")
            assert calls % LAYERS == 0


@pytest.fixture(scope="module")
def models(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pooling")
    return {
        "decoder": checkpoint("qwen3"),
        "cross-encoder": variants.encoder(folder / "cross", "BertForSequenceClassification", num_labels=1),
        "tagger": variants.encoder(folder / "tagger", "BertForTokenClassification", num_labels=LABELS),
    }


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], distribution: str) -> dict[str, Any]:
    """One process with engines for what vLLM alone has."""
    processor = {"do": "encode_plugin", "data": {"texts": [WORDS, "hello"]}}
    pooling = {"runner": "pooling"}
    started = start_features(
        (models["decoder"], [processor], {**pooling, "io_processor_plugin": "shape"}),
        (models["cross-encoder"], [{"do": "score", "query": QUERY, "documents": DOCUMENTS}], {**pooling, **WHOLE}),
        (models["tagger"], [{"do": "token_classify", "prompts": PROMPTS}], {**pooling, **WHOLE}),
        PYTHONPATH=distribution,
    )
    return dict(zip(models, started.result()["runs"], strict=True))


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


@pytest.mark.parametrize("kind", ["cross-encoder", "tagger"])
def test_our_attention_served_them(kind: str, runs: dict[str, Any]) -> None:
    report = runs[kind]["report"]
    assert report["attention"] == {"AttentionFLImpl": LAYERS}
    assert report["model_runner"] == "V2"
    assert any(key.startswith("paged_attention ") for key in report["counts"])
