"""An engine of each model family gives Hugging Face's tokens, also from the prefix cache, only by right operators.

One engine a family answers all of it, step by step: prompts in chunks, the same from the prefix cache, a wrong
implementation of each operator, and a right one at the end. The engine is in the process that sets policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, STEP, Runs, ran, start

from fl_dispatch.backends.vendor.cpu import library
from sampling import drawn

LAYERS = 3
PAGED = ("kv_cache_write", "paged_attention")
LATENT = ("kv_cache_write", "mla_decode", "mla_prefill")
LLAMA = ("rms_norm", "silu_and_mul", "rotary_embedding", *PAGED)
GEMMA = ("gemma_rms_norm", "gelu_and_mul", "rotary_embedding", *PAGED)
EXPERTS = ("rms_norm", "rotary_embedding", *PAGED, "fused_moe")
DEEPSEEK = ("rms_norm", "silu_and_mul", "rotary_embedding", *LATENT, "grouped_topk", "fused_moe")
SPARSE = (*(name for name in DEEPSEEK if name not in LATENT), "kv_cache_write", "layer_norm")
SPARSE = (*SPARSE, "index_key_write", "index_topk", "mla_sparse")


@dataclass(frozen=True)
class Family:
    """Expectations of a family's engine.

    Args:
        operators: all that run.
        wrong: those of which a wrong implementation is tried; of each operator of ours in some family. A scope may
            follow.
        expert_layers: with experts; the others are dense.
        layer: a replaced class that only this family has.
        linear: whether the products are a vendor's.
        layers: with attention.
    """

    operators: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    expert_layers: int = 0
    layer: str | None = None
    linear: bool = False
    layers: int = LAYERS

    @property
    def routing(self) -> str:
        (operator,) = set(self.operators) & {"topk_softmax", "topk_sigmoid", "grouped_topk"}
        return operator

    @property
    def attention(self) -> str:
        classes = {"paged_attention": "AttentionFLImpl", "mla_decode": "MLAFLImpl", "mla_sparse": "SparseMLAFLImpl"}
        (found,) = (classes[operator] for operator in self.operators if operator in classes)
        return found


ONE_LAYER = "fused_moe@model.layers.2.mlp.experts"
ROUTER = "linear@model.layers.2.mlp.gate"
FAMILIES = {
    "qwen3": Family((*LLAMA, "linear"), wrong=(*LLAMA, "linear"), linear=True),
    "llama": Family(LLAMA),
    "gemma3": Family(GEMMA, wrong=("gemma_rms_norm", "gelu_and_mul"), layers=6),
    "llama_yarn": Family(LLAMA, layer="YaRNScalingRotaryEmbedding"),
    "phi3": Family(LLAMA, layer="Phi3LongRoPEScaledRotaryEmbedding"),  # LongRoPE on half of each head
    "gemma2": Family(GEMMA, layer="GemmaRMSNorm"),  # soft caps, a window in every other layer, tied embeddings
    "bloom": Family(("gelu", *PAGED), layer="GELU"),  # ALiBi
    "qwen3_moe": Family(
        (*EXPERTS, "topk_softmax", "linear"), ("fused_moe", "topk_softmax", "linear", ONE_LAYER, ROUTER), 3, linear=True
    ),
    "mixtral": Family((*EXPERTS, "topk_softmax"), ("fused_moe", "topk_softmax"), 3),
    "minimax_m2": Family((*EXPERTS, "topk_sigmoid"), ("fused_moe", "topk_sigmoid"), 3),
    "glm4_moe": Family((*EXPERTS, "grouped_topk", "silu_and_mul"), ("fused_moe", "grouped_topk"), 2),
    "deepseek_v2": Family((*DEEPSEEK, "linear"), ("mla_decode", "mla_prefill", "linear"), 2, linear=True),
    "deepseek_v32": Family(SPARSE, ("index_key_write", "index_topk", "mla_sparse"), 2),
    "glm_moe_dsa": Family(SPARSE, ("index_topk",), 2),  # a layer with the lists of the layer before
    "deepseek_v3": Family(DEEPSEEK, (), 2, layer="DeepseekScalingRotaryEmbedding"),  # a low-rank query, YaRN
}
KEPT = ("qwen3", "llama", "qwen3_moe")
DENSE = [name for name, family in FAMILIES.items() if name not in KEPT and not family.expert_layers]
MIXTURES = [name for name, family in FAMILIES.items() if name not in KEPT and family.expert_layers]
DRAWN = {*KEPT, *drawn(DENSE, 2, "dense families of vLLM"), *drawn(MIXTURES, 3, "mixtures of vLLM")}
BLOCK = 16
if not library.why_unavailable():  # in the environment with the compiled CPU kernels, which have larger blocks
    BLOCK = 32
    DRAWN = {"qwen3", "llama", "gemma3"}
FAMILIES = {name: family for name, family in FAMILIES.items() if name in DRAWN}
WITH_EXPERTS = [name for name, family in FAMILIES.items() if family.expert_layers]
WRONG = [(name, operator) for name, family in FAMILIES.items() for operator in family.wrong]

PLUGIN = {
    "VLLM_FL_PLUGIN_MODULES": "wrong_plugin",
    "VLLM_FL_DENY_VENDORS": "wrong",
    "VLLM_FL_PER_OP": "linear=reference",
}
WITH_PRODUCTS = {
    **PLUGIN,
    "VLLM_FL_PLUGIN_MODULES": "wrong_plugin,linear_plugin",
    "VLLM_FL_PER_OP": "linear=impl:vendor.products",
}
WRONG_CLASS = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin", "VLLM_FL_PER_OP": "attention_backend=impl:vendor.wrong"}

each_family = pytest.mark.parametrize("family", FAMILIES)
Expected = Callable[[str], list[list[int]]]


WRONG_ONE, WRONG_PRODUCTS = "vendor.wrong", "vendor.wrong_products"


def _steps(family: Family) -> list[Mapping[str, Any]]:
    def changed(**per_op: list[str]) -> dict[str, Any]:
        products = {"linear": ["impl:vendor.products"]} if family.linear else {}
        policy = {"prefer": "reference", "per_op_order": {**products, **per_op}}
        return {**STEP, "policy": policy, "reset": True}  # else it would read what the last implementation wrote

    wrong = [
        {name: ["impl:vendor.wrong_products" if name.startswith("linear") else "impl:vendor.wrong"]}
        for name in family.wrong
    ]
    return [STEP, STEP, *(changed(**rule) for rule in wrong), changed()]


@pytest.fixture(scope="session")
def results(checkpoint: Callable[[str], Path]) -> Mapping[str, Any]:
    """Two passes, a pass for each wrong implementation, and a right one; and an engine with a wrong attention class."""
    runs = {
        name: start(checkpoint(name), *_steps(family), variables=WITH_PRODUCTS if family.linear else PLUGIN)
        for name, family in FAMILIES.items()
    }
    return Runs({**runs, "wrong class": start(checkpoint("llama"), variables=WRONG_CLASS)})


@each_family
def test_tokens_equal_hugging_face(family: str, results: Mapping[str, Any], expected: Expected) -> None:
    assert results[family]["steps"][0]["tokens"] == expected(family)


@each_family
def test_a_pass_from_the_prefix_cache_gives_the_same_tokens(
    family: str, results: Mapping[str, Any], expected: Expected
) -> None:
    first, second = results[family]["steps"][:2]
    assert first["cached"] == [0] * len(PROMPTS)
    assert second["cached"] == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
    assert second["tokens"] == expected(family)


@each_family
def test_vllm_counts_the_same_hits(family: str, results: Mapping[str, Any]) -> None:
    metrics, steps = results[family]["metrics"], results[family]["steps"]
    assert metrics["vllm:prefix_cache_hits"] == sum(sum(step["cached"]) for step in steps)
    assert metrics["vllm:prefix_cache_queries"] == len(steps) * sum(map(len, PROMPTS))


@each_family
def test_every_operator_ran_in_the_engine_and_no_layer_is_native(family: str, results: Mapping[str, Any]) -> None:
    report, about = results[family]["report"], FAMILIES[family]
    assert {key.split(" ")[0] for key in report["counts"]} == set(about.operators)
    assert report["native_layers"] == {}
    assert report["attention"] == {about.attention: about.layers}
    assert report["failed"] == {}
    assert about.layer is None or about.layer in report["layers"]
    assert "layers through fl_dispatch" in results[family]["log"]


def _calls(report: Mapping[str, Any]) -> dict[str, int]:
    """Operator → calls of all its implementations."""
    calls: dict[str, int] = {}
    for key, count in report["counts"].items():
        calls[key.split(" ")[0]] = calls.get(key.split(" ")[0], 0) + count
    return calls


def test_calls_are_counted_one_a_layer_and_step(results: Mapping[str, Any]) -> None:
    calls = _calls(results["llama"]["report"])
    steps, rest = divmod(calls["paged_attention"], LAYERS)
    assert rest == 0
    assert calls["silu_and_mul"] == calls["rotary_embedding"] == calls["kv_cache_write"] == LAYERS * steps
    assert calls["rms_norm"] == (2 * LAYERS + 1) * steps


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_and_routing_run_through_our_operators_once_a_layer_and_step(
    family: str, results: Mapping[str, Any]
) -> None:
    report, about = results[family]["report"], FAMILIES[family]
    calls = _calls(report)
    steps, rest = divmod(calls["kv_cache_write"], LAYERS)
    assert rest == 0
    assert calls["fused_moe"] == calls[about.routing] == steps * about.expert_layers
    assert report["layers"]["UnquantizedFusedMoEMethod"] == report["layers"]["MoERunner"] == about.expert_layers


@pytest.mark.parametrize(("family", "operator"), WRONG)
def test_a_wrong_implementation_changes_the_tokens(
    family: str, operator: str, results: Mapping[str, Any], expected: Expected
) -> None:
    step = results[family]["steps"][2 + FAMILIES[family].wrong.index(operator)]
    assert step["cached"] == [0] * len(PROMPTS), "it would read what a right implementation wrote"
    assert step["tokens"] != expected(family)
    assert ran(results[family], operator.partition("@")[0]) & {WRONG_ONE, WRONG_PRODUCTS}


@each_family
def test_with_right_implementations_the_same_engine_is_right_again(
    family: str, results: Mapping[str, Any], expected: Expected
) -> None:
    assert results[family]["steps"][-1]["tokens"] == expected(family)


@pytest.mark.skipif("qwen3_moe" not in FAMILIES, reason="not among the families of this run")
def test_a_rule_can_name_the_experts_of_one_layer(results: Mapping[str, Any], expected: Expected) -> None:
    everywhere, one_layer = (
        results["qwen3_moe"]["steps"][2 + FAMILIES["qwen3_moe"].wrong.index(name)]["tokens"]
        for name in ("fused_moe", ONE_LAYER)
    )
    assert one_layer not in (everywhere, expected("qwen3_moe"))


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.linear])
def test_the_products_of_a_model_are_the_vendors(family: str, results: Mapping[str, Any]) -> None:
    assert ran(results[family], "linear") == {"vendor.products", WRONG_PRODUCTS}


def test_where_no_product_of_ours_comes_first_the_layers_stay_vllms_and_no_gap_is_reported(
    results: Mapping[str, Any],
) -> None:
    report = results["llama"]["report"]
    assert ran(results["llama"], "linear") == set()
    assert report["native_layers"] == {}
    assert "QKVParallelLinear" not in report["layers"]
    assert "QKVParallelLinear" in results["qwen3"]["report"]["layers"]


def test_a_wrong_attention_class_changes_the_tokens(results: Mapping[str, Any], expected: Expected) -> None:
    result = results["wrong class"]
    assert set(result["report"]["attention"]) == {"ForgetfulImpl"}
    assert result["steps"][0]["tokens"] != expected("llama")


def test_a_prompt_of_several_chunks_took_several_steps(results: Mapping[str, Any]) -> None:
    longest = max(map(len, PROMPTS))
    steps = _calls(results["llama"]["report"])["paged_attention"] // LAYERS
    assert longest > 64
    assert steps > (len(results["llama"]["steps"]) - 1) * (MAX_TOKENS + longest // 64)
