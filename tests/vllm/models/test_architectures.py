"""Engines of further architectures give Hugging Face's tokens, through our operators only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, STEP, Runs, expected_tokens, ran, start

from architectures import ARCHITECTURES, WITHOUT_ATTENTION, build_architecture
from sampling import drawn

NAMES = drawn(tuple(name for name in ARCHITECTURES if name not in WITHOUT_ATTENTION), 3, "architectures")
PLUGIN = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin", "VLLM_FL_DENY_VENDORS": "wrong"}
WRONG = {"prefer": "reference", "per_op_order": {"paged_attention": ["impl:vendor.wrong"]}}
EXPERTS = {
    *("olmoe", "granitemoe", "gpt_oss", "qwen2_moe", "qwen3_5_moe", "qwen3_next"),
    *("granitemoehybrid", "jamba", "lfm2_moe"),
}
TRANSFORMERS = {"olmo2", "smollm3"}
"""Those with a norm that vLLM puts into Transformers' own class of the model."""

each = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("architectures")
    return {name: build_architecture(name, root / name) for name in NAMES}


@pytest.fixture(scope="module")
def results(models: Mapping[str, Path], checkpoint: Callable[[str], Path]) -> Mapping[str, Any]:
    """Two passes, the second from the prefix cache, and one with a wrong attention."""
    wrong = {**STEP, "policy": WRONG, "reset": True}
    return Runs({name: start(path, STEP, STEP, wrong, variables=PLUGIN) for name, path in models.items()})


@each
def test_tokens_equal_hugging_face_also_from_the_prefix_cache(
    name: str, results: Mapping[str, Any], models: Mapping[str, Path]
) -> None:
    first, second, _ = results[name]["steps"]
    assert first["tokens"] == second["tokens"] == expected_tokens(models[name])
    assert first["cached"] == [0] * len(PROMPTS)
    assert second["cached"][2] > 0


@each
def test_every_layer_that_could_run_our_operators_does(name: str, results: Mapping[str, Any]) -> None:
    report = results[name]["report"]
    operators = {key.split(" ")[0] for key in report["counts"]}
    assert {"kv_cache_write", "paged_attention"} <= operators
    assert ("fused_moe" in operators) == (name in EXPERTS)
    assert ("TPAwareRMSNorm" in report["layers"]) == (name in TRANSFORMERS)
    assert report["native_layers"] == {}
    assert report["failed"] == {}


@each
def test_a_wrong_attention_changes_the_tokens(name: str, results: Mapping[str, Any]) -> None:
    first, _, wrong = results[name]["steps"]
    assert wrong["tokens"] != first["tokens"]
    assert "vendor.wrong" in ran(results[name], "paged_attention")
