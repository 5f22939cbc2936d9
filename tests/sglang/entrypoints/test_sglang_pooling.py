"""Vectors and classes of texts under SGLang are Hugging Face's: of a decoder's last token, and of an encoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from serving import start

import variants
from running import ran

TEXTS = ["the river", "water and salt of the sea", "hello world", "the " * 90 + "sea"]
LABELS = 3
KINDS = ("embedding", "classes", "encoder")
each = pytest.mark.parametrize("kind", KINDS)
WRONG = {"prefer": "reference", "per_op_order": {"paged_attention": ["impl:vendor.wrong"]}}
PLUGINS = {"SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method", "SGLANG_FL_PREFER": "reference"}


def _classifier(model: Path, target: Path) -> Path:
    """SGLang's head has a bias, which it leaves as it finds memory where a checkpoint has none."""
    variants.classifier(model, target, LABELS)
    weights = target / variants.WEIGHTS
    save_file({**load_file(weights), "score.bias": torch.zeros(LABELS)}, weights, metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def models(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pooling")
    encoder = variants.encoder(folder / "encoder")
    config = json.loads((encoder / "config.json").read_text())
    config["position_embedding_type"] = "absolute"  # Transformers writes it no more, and SGLang reads it
    (encoder / "config.json").write_text(json.dumps(config))
    return {
        "embedding": checkpoint("qwen3"),
        "classes": _classifier(checkpoint("qwen3"), folder / "classes"),
        "encoder": encoder,
    }


@pytest.fixture(scope="module")
def result(models: dict[str, Path]) -> Callable[[str], dict[str, Any]]:
    """A kind → the texts twice, one of them alone, and once with a wrong attention."""
    steps = [{"encode": TEXTS}, {"encode": TEXTS}, {"encode": TEXTS[:1]}, {"encode": TEXTS, "policy": WRONG}]
    runs = {}
    for kind, model in models.items():
        engine: dict[str, Any] = {"is_embedding": True}
        if kind == "encoder":  # all of a text attends to all of it
            engine |= {"chunked_prefill_size": -1, "disable_radix_cache": True, "mem_fraction_static": 0.5}
        runs[kind] = start(model, *steps, engine=engine, variables=PLUGINS)
    return lambda kind: runs[kind].result()


def _expected(kind: str, model: Path) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    name = "AutoModelForSequenceClassification" if kind == "classes" else "AutoModel"
    network = getattr(transformers, name).from_pretrained(model, dtype=torch.float32).eval()
    network.config.pad_token_id = 0
    rows = []
    with torch.no_grad():
        for text in TEXTS:
            found = network(torch.tensor([tokenizer(text).input_ids]))
            if kind == "classes":
                rows.append(found.logits[0])
            else:
                place = 0 if kind == "encoder" else -1
                rows.append(torch.nn.functional.normalize(found.last_hidden_state[0, place], dim=-1))
    return torch.stack(rows)


@each
def test_vectors_equal_hugging_face(
    kind: str, result: Callable[[str], dict[str, Any]], models: dict[str, Path]
) -> None:
    right = _expected(kind, models[kind])
    first, again, alone, _ = (torch.tensor(step["vectors"]) for step in result(kind)["steps"])
    for got in (first, again, alone):
        assert torch.allclose(got, right[: len(got)], atol=1e-4, rtol=1e-4)


@each
def test_a_wrong_attention_changes_them(
    kind: str, result: Callable[[str], dict[str, Any]], models: dict[str, Path]
) -> None:
    wrong = torch.tensor(result(kind)["steps"][3]["vectors"])
    assert not torch.allclose(wrong, _expected(kind, models[kind]), atol=1e-2, rtol=1e-2)


@each
def test_our_operators_ran(kind: str, result: Callable[[str], dict[str, Any]]) -> None:
    report = result(kind)["report"]
    assert report["native_layers"] == report["undispatched"] == report["failed"] == {}
    assert ran(result(kind), "paged_attention") == {"reference.torch", "vendor.wrong"}
