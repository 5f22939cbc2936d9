"""Multi-head latent attention: tokens equal Hugging Face's, from the prefix cache too, and both operators matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, ran, start

LAYERS = 3
FAMILY = "deepseek_v2"
PLUGIN = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin"}
WRONG = ("mla_decode", "mla_prefill")


def step(**policy: Any) -> dict[str, Any]:
    return {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "policy": {"prefer": "reference", **policy}}


@pytest.fixture(scope="session")
def result(checkpoint: Callable[[str], Path]) -> dict[str, Any]:
    """One engine: two right passes, one with each operator wrong, and a right one; prompts are chunked at 64 tokens."""
    wrong = [step(per_op_order={operator: ["impl:vendor.wrong"]}) for operator in WRONG]
    return start(checkpoint(FAMILY), step(), step(), *wrong, step(), variables=PLUGIN).result()


def test_tokens_equal_hugging_face(result: dict[str, Any], expected: Callable[[str], list[list[int]]]) -> None:
    assert result["steps"][0]["cached"] == [0] * len(PROMPTS)
    assert result["steps"][0]["tokens"] == expected(FAMILY)


def test_a_pass_over_cached_context_gives_the_same_tokens(
    result: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result["steps"][1]["cached"] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert result["steps"][1]["tokens"] == expected(FAMILY)


def test_both_forms_ran_and_no_layer_is_native(result: dict[str, Any]) -> None:
    report = result["report"]
    assert report["attention"] == {"MLAFLImpl": LAYERS}
    assert report["native_layers"] == {}
    assert report["failed"] == {}
    for operator in WRONG:
        assert ran(result, operator) == {"reference.torch", "vendor.wrong"}
    assert "kv_cache_write reference.torch" in report["counts"]
    assert not ran(result, "paged_attention")


@pytest.mark.parametrize("position", range(len(WRONG)), ids=WRONG)
def test_a_wrong_implementation_changes_the_tokens(
    position: int, result: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result["steps"][2 + position]["tokens"] != expected(FAMILY)
    assert result["steps"][-1]["tokens"] == expected(FAMILY)
