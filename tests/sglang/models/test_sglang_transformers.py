"""A model that SGLang runs by Transformers' code attends through our operators, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import STEP, start

from running import ran

ONE = {"prefer": "reference", "per_op_order": {"paged_attention@model.layers.1.*": ["impl:vendor.wrong"]}}
PLUGINS = {"SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method", "SGLANG_FL_PREFER": "reference"}


@pytest.fixture(scope="module")
def result(checkpoint: Callable[[str], Path]) -> dict[str, Any]:
    """Two passes, and one with a wrong attention in the second layer."""
    engine = {"model_impl": "transformers"}
    return start(checkpoint("qwen3"), STEP, STEP, {**STEP, "policy": ONE}, variables=PLUGINS, engine=engine).result()


def test_tokens_equal_hugging_face_again_from_the_radix_cache(
    result: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    first, again, _ = result["steps"]
    assert first["tokens"] == again["tokens"] == expected("qwen3")
    assert max(again["cached"]) > 300


def test_a_rule_for_one_layer_holds_for_its_attention(
    result: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result["steps"][2]["tokens"] != expected("qwen3")
    counts = result["report"]["counts"]
    wrong, right = (counts[f"paged_attention {name}"] for name in ("vendor.wrong", "reference.torch"))
    assert 0 < wrong < right


def test_the_report_names_its_layers(result: dict[str, Any]) -> None:
    report = result["report"]
    assert report["attention"] == {"RadixAttention": 3}
    assert report["undispatched"] == report["failed"] == {}
    assert ran(result, "rms_norm") == {"reference.torch"}
