"""Norms and gated activations of quantized models: compiled graphs call one operator for them and the quantization.

No CPU has an implementation of such an operator but the reference, so a plugin brings one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from engines import Runs, ran, start_compiled

import quantized_checkpoints as checkpoints
from quantized_checkpoints import SCHEMES
from sampling import drawn

pytestmark = pytest.mark.engine
JOINED = ("rms_norm_quantize", "silu_and_mul_quantize")
SCHEME = drawn(("compressed-tensors W8A8 int8", "fp8, blocks of 128"), 1, "quantized rows, joined")[0]
DENY = {"deny_vendors": ["wrong"]}
APART = {"pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False}}
WRONG = drawn(JOINED, 1, "wrong joined operators")[0]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("joined")
    model = checkpoints.write_checkpoint(folder / "checkpoint", SCHEMES[SCHEME])

    def engine(policy: dict[str, Any], **compilation: Any) -> dict[str, Any]:
        config = {"mode": "VLLM_COMPILE", "backend": "inductor", **compilation}
        return {"model": model, "engine": {"enforce_eager": False, "compilation_config": config}, "policy": policy}

    engines = {
        "joined": engine(DENY),
        "apart": engine(DENY, **APART),
        "a rule for a part": engine({**DENY, "per_op_order": {"quantize": ["reference"]}}),
        "no implementation": engine({"deny_vendors": ["wrong", "joined"]}),
        "wrong": engine({"per_op_order": {WRONG: ["impl:vendor.wrong"]}}),
    }
    cache = str(tmp_path_factory.mktemp("cache"))
    return Runs(
        start_compiled(engines, VLLM_CACHE_ROOT=cache, VLLM_FL_PLUGIN_MODULES="joined_plugin,wrong_plugin")
    )


def test_graphs_call_the_joined_operators(results: Mapping[str, Any]) -> None:
    result = results["joined"]
    assert all(ran(result, operator) == {"vendor.joined"} for operator in JOINED)
    assert result["tokens"] == results["apart"]["tokens"]
    assert result["report"]["failed"] == {}


def test_only_the_attentions_result_is_quantized_by_itself(results: Mapping[str, Any]) -> None:
    """A layer has four products, and the results of two norms and of its activation are quantized beside."""
    calls: Counter[str] = Counter()
    for key, count in results["joined"]["report"]["counts"].items():
        calls[key.split(" ")[0]] += count
    assert calls["quantize"]
    assert calls["rms_norm_quantize"] == 2 * calls["quantize"]
    assert calls["silu_and_mul_quantize"] == calls["quantize"]
    assert calls["scaled_linear"] == 4 * calls["quantize"]


def test_equal_layers_are_compiled_once(results: Mapping[str, Any]) -> None:
    compiled = {name: results[name]["report"]["compiled"] for name in ("joined", "apart")}
    assert compiled["joined"]["pieces"] == compiled["apart"]["pieces"] > 3
    assert compiled["joined"]["distinct"] == compiled["apart"]["distinct"] == 3


@pytest.mark.parametrize("name", ["apart", "a rule for a part", "no implementation"])
def test_they_stay_apart_if_the_user_says_so_or_nothing_is_faster(name: str, results: Mapping[str, Any]) -> None:
    assert not any(ran(results[name], operator) for operator in JOINED)
    assert ran(results[name], "quantize")
    assert results[name]["tokens"] == results["joined"]["tokens"]


def test_a_wrong_joined_operator_changes_tokens(results: Mapping[str, Any]) -> None:
    assert ran(results["wrong"], WRONG) == {"vendor.wrong"}
    assert results["wrong"]["tokens"] != results["joined"]["tokens"]
