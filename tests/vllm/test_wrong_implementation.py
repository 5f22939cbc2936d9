"""Every operator matters: a deliberately wrong implementation of it changes the tokens.

The engine runs in the test's process, so one start serves all operators of a model: the policy changes between passes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, ran, start

CASES = {
    "qwen3": ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"),
    "gemma3": ("gemma_rms_norm", "gelu_and_mul"),
}
PLUGIN = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin"}
NO_PREFIX_CACHE = {"enable_prefix_caching": False}  # else a pass would read keys that a right implementation wrote


def step(**policy: Any) -> dict[str, Any]:
    return {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "policy": {"prefer": "reference", **policy}}


@pytest.fixture(scope="session")
def results(checkpoint: Callable[[str], Path]) -> dict[str, Any]:
    """A right pass, one pass an operator with its wrong implementation, and a right pass at the end."""
    runs = {}
    for family, operators in CASES.items():
        wrong = [step(per_op_order={operator: ["impl:vendor.wrong"]}) for operator in operators]
        steps = [step(), *wrong, step()]
        runs[family] = start(checkpoint(family), *steps, variables=PLUGIN, engine=NO_PREFIX_CACHE)
    runs["attention_backend"] = start(
        checkpoint("llama"), variables={**PLUGIN, "VLLM_FL_PER_OP": "attention_backend=impl:vendor.wrong"}
    )
    return {name: run.result() for name, run in runs.items()}


@pytest.mark.parametrize(
    ("family", "position"),
    [(family, position) for family, operators in CASES.items() for position in range(len(operators))],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_implementation_changes_the_tokens(
    family: str, position: int, results: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    operator = CASES[family][position]
    assert results[family]["steps"][position + 1]["tokens"] != expected(family)
    assert "vendor.wrong" in ran(results[family], operator)


@pytest.mark.parametrize("family", CASES)
def test_with_right_implementations_the_same_engine_is_right(
    family: str, results: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert results[family]["steps"][0]["tokens"] == expected(family)
    assert results[family]["steps"][-1]["tokens"] == expected(family)


def test_a_wrong_attention_class_changes_the_tokens(
    results: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    result = results["attention_backend"]
    assert set(result["report"]["attention"]) == {"ForgetfulImpl"}
    assert result["steps"][0]["tokens"] != expected("llama")
