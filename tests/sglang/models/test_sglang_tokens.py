"""Greedy tokens equal Hugging Face's in float32, in chunks, again from the radix cache, and only with right operators.

One engine a family, in which memory that nobody has written holds NaN. The scheduler is a process of its own, and all
that is asserted about calls and layers was reported from there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import STEP, start

from running import MAX_TOKENS, PROMPTS
from sampling import drawn

LAYERS = ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "linear")
DENSE = (*LAYERS, "paged_attention")
SPARSE = (*LAYERS, "layer_norm", "index_key_write", "index_topk", "mla_sparse", "grouped_topk", "fused_moe")
GEMMA = ("gemma_rms_norm", "gelu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention", "linear")
OPERATORS = {
    "qwen2": DENSE,
    "qwen3": DENSE,
    "llama": DENSE,
    "qwen3_moe": (*(operator for operator in DENSE if operator != "silu_and_mul"), "topk_softmax", "fused_moe"),
    "deepseek_v3": (*LAYERS, "mla_decode", "grouped_topk", "fused_moe"),
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,  # a layer with the lists of the layer before
    "gemma2": GEMMA,
}
KEPT = ("qwen3", "llama")
DRAWN = {*KEPT, *drawn([name for name in OPERATORS if name not in KEPT], 2, "families of SGLang")}
OPERATORS = {name: operators for name, operators in OPERATORS.items() if name in DRAWN}
LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
ATTENTION_LAYERS = dict.fromkeys(LATENT, 6)  # elsewhere three; two of DeepSeek's share each cache
PAGES = {"llama": 16, "gemma2": 16}  # elsewhere pages of one token
WRONG = {  # each operator once
    "qwen3": DENSE,
    "gemma2": ("gemma_rms_norm", "gelu_and_mul"),
    "qwen3_moe": ("topk_softmax", "fused_moe"),
    "deepseek_v3": ("mla_decode", "grouped_topk"),
    "deepseek_v32": ("index_key_write", "index_topk", "mla_sparse"),
}
WRONG = {name: operators for name, operators in WRONG.items() if name in DRAWN}
WRONG_CASES = [(family, position) for family, operators in WRONG.items() for position in range(len(operators))]
HINTED = {name: ["impl:vendor.hinted"] for name in ("kv_cache_write", "paged_attention")}
PLUGINS = {
    "SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,linear_plugin,hinted_plugin,policy_method,unwritten_memory",
    "SGLANG_FL_PREFER": "reference",
    "SGLANG_FL_PER_OP": "linear=impl:vendor.products|reference",  # PyTorch's product would stay SGLang's
}


def _wrong(operator: str) -> str:
    return "vendor.wrong_products" if operator == "linear" else "vendor.wrong"


def _with_policy(**policy: Any) -> dict[str, Any]:
    return {**STEP, "policy": {"prefer": "reference", **policy}}


@pytest.fixture(scope="module")
def result(checkpoint: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """A family: two passes over the same prompts; where there are wrong implementations, one for each of them.

    After those one that compares hints, and a right one.
    """
    runs = {}
    for family in OPERATORS:
        wrong = [_with_policy(per_op_order={name: [f"impl:{_wrong(name)}"]}) for name in WRONG.get(family, ())]
        runs[family] = start(
            checkpoint(family),
            *(STEP, STEP, *wrong, *([_with_policy(per_op_order=HINTED), _with_policy()] if wrong else [])),
            variables=PLUGINS,
            engine={"page_size": PAGES.get(family, 1)},
        )
    return lambda family: runs[family].result()


@pytest.mark.parametrize("family", OPERATORS)
def test_tokens_equal_hugging_face(
    family: str, result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result(family)["steps"][0]["tokens"] == expected(family)


@pytest.mark.parametrize("family", OPERATORS)
def test_a_pass_from_the_radix_cache_gives_the_same_tokens(
    family: str, result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    first, second = result(family)["steps"][:2]
    page = PAGES.get(family, 1)
    assert first["cached"] == [0] * len(PROMPTS)
    assert second["cached"] == [(len(prompt) - 1) // page * page for prompt in PROMPTS]
    assert second["tokens"] == expected(family)


@pytest.mark.parametrize("family", OPERATORS)
def test_every_layer_is_ours_in_the_scheduler_process(family: str, result: Callable[[str], dict[str, Any]]) -> None:
    report = result(family)["report"]
    assert report["pid"] != result(family)["pid"]
    assert report["native_layers"] == {}
    assert report["fallen_through"] == {}
    assert report["undispatched"] == {}
    assert report["failed"] == {}
    assert report["attention_backend"] == ("MLAFLBackend" if family in LATENT else "AttentionFLBackend")
    assert report["attention"] == {"RadixAttention": ATTENTION_LAYERS.get(family, 3)}
    assert report["layers"]
    assert {key.split(" ")[0] for key in report["counts"]} == {*OPERATORS[family]}
    assert "layers through fl_dispatch" in result(family)["log"]


def test_calls_are_counted_one_a_layer_and_step(result: Callable[[str], dict[str, Any]]) -> None:
    calls = {key.split(" ")[0]: count for key, count in result("llama")["report"]["counts"].items()}
    steps, rest = divmod(calls["paged_attention"], 3)
    assert rest == 0
    assert steps > 2 * MAX_TOKENS
    assert calls["silu_and_mul"] == calls["rotary_embedding"] == calls["kv_cache_write"] == 3 * steps
    assert calls["rms_norm"] == (2 * 3 + 1) * steps
    assert calls["linear"] == 4 * 3 * steps


@pytest.mark.parametrize("family", OPERATORS)
def test_a_prompt_longer_than_a_chunk_is_computed_in_several_steps(
    family: str, result: Callable[[str], dict[str, Any]]
) -> None:
    new = [line for line in result(family)["log"].splitlines() if "Prefill batch" in line]
    assert len(new) >= -(-sum(map(len, PROMPTS)) // 64)


@pytest.mark.parametrize(("family", "position"), WRONG_CASES, ids=lambda value: value if value in WRONG else None)
def test_a_wrong_implementation_changes_the_tokens(
    family: str, position: int, result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    operator = WRONG[family][position]
    assert result(family)["steps"][2 + position]["tokens"] != expected(family)
    assert result(family)["report"]["counts"][f"{operator} {_wrong(operator)}"] > 0


@pytest.mark.parametrize("family", WRONG)
def test_what_every_step_says_of_its_tensors_is_true(
    family: str, result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    """The implementation raises where a hint is wrong or missing."""
    assert result(family)["steps"][-2]["tokens"] == expected(family)
    assert result(family)["report"]["counts"]["kv_cache_write vendor.hinted"] > 0


@pytest.mark.parametrize("family", WRONG)
def test_with_right_implementations_the_same_engine_is_right_again(
    family: str, result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result(family)["steps"][-1]["tokens"] == expected(family)
