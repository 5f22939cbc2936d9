"""The gated delta net: Hugging Face's tokens by our operators, in chunks and batches, from the prefix cache.

Three passes of one engine show that a state in the prefix cache outlives those who read it. Wrong implementations and
forgetful ones run in an engine whose blocks they leave dirty, and a right pass comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, RUNNERS, STEP, Runs, expected_tokens, ran, start

from architectures import build_architecture
from sampling import drawn
from vllm_fl.layers import delta_net

DENSE, EXPERTS = "qwen3_5", "qwen3_next"
DELTA_LAYERS, ATTENTION_LAYERS = 2, 2
OPERATORS = (*delta_net.OPERATORS, "rms_norm_gated")
PLUGINS = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin,forgetful_plugin", "VLLM_FL_DENY_VENDORS": "wrong,forgetful"}
MISTAKES = [
    *((operator, "vendor.wrong") for operator in OPERATORS),
    *((operator, "vendor.forgetful") for operator in delta_net.OPERATORS),
    ("gated_delta_rule_update@model.layers.2.linear_attn", "vendor.wrong"),
]
BLOCK = 32
"""Tokens of a block: vLLM makes it so large that a state fits in."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "compiled": {"enforce_eager": False},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "chunks of 16 tokens, no prefix cache": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "one request at a time": {"max_num_seqs": 1},
}
DRAWN = drawn(tuple(WAYS), 1, "ways to run a gated delta net")
FEW_BLOCKS = {"num_gpu_blocks_override": 20, "max_model_len": 352}
"""So few that a request has to give its states up while it generates."""


def _with(**per_op: list[str]) -> dict[str, Any]:
    return {**STEP, "policy": {"prefer": "reference", "per_op_order": per_op}, "reset": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("delta nets")
    return {name: build_architecture(name, root / name) for name in (DENSE, EXPERTS)}


@pytest.fixture(scope="module")
def expected(models: Mapping[str, Path]) -> Mapping[str, Any]:
    return {name: expected_tokens(path) for name, path in models.items()}


@pytest.fixture(scope="module")
def results(models: Mapping[str, Path]) -> Mapping[str, Any]:
    mistakes = [_with(**{operator: [f"impl:{impl}"]}) for operator, impl in MISTAKES]
    return Runs(
        {
            "mistakes": start(models[EXPERTS], STEP, *mistakes, _with(), variables=PLUGINS),
            **{name: start(models[DENSE], STEP, STEP, STEP, variables=given) for name, given in RUNNERS.items()},
            "few blocks": start(models[DENSE], STEP, STEP, engine=FEW_BLOCKS),
            **{way: start(models[DENSE], STEP, STEP, engine=dict(WAYS[way])) for way in DRAWN},
        }
    )


@pytest.mark.parametrize("runner", RUNNERS)
def test_tokens_equal_hugging_face_also_from_the_prefix_cache_and_again(
    runner: str, results: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    result = results[runner]
    assert [step["tokens"] for step in result["steps"]] == [expected[DENSE]] * 3
    longest = max(map(len, PROMPTS))
    whole_blocks = [(longest - 1) // BLOCK * BLOCK if len(prompt) == longest else 0 for prompt in PROMPTS]
    assert [step["cached"] for step in result["steps"]] == [[0] * len(PROMPTS), whole_blocks, whole_blocks]
    assert result["report"]["model_runner"] == runner


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_operator_runs_once_a_layer_and_step_and_no_layer_is_native(
    runner: str, results: Mapping[str, Any]
) -> None:
    report = results[runner]["report"]
    calls = {key.split(" ")[0]: count for key, count in report["counts"].items()}
    steps, rest = divmod(calls["paged_attention"], ATTENTION_LAYERS)
    assert rest == 0
    assert calls["rms_norm_gated"] == DELTA_LAYERS * steps
    assert calls["causal_conv1d"] == calls["gated_delta_rule"]
    assert calls["causal_conv1d_update"] == calls["gated_delta_rule_update"]
    assert DELTA_LAYERS * steps <= calls["gated_delta_rule"] + calls["gated_delta_rule_update"]
    assert calls["gated_delta_rule_update"] >= DELTA_LAYERS * 3 * (MAX_TOKENS - 1)
    assert report["layers"]["QwenGatedDeltaNetAttention"] == report["layers"]["RMSNormGated"] == DELTA_LAYERS
    assert report["attention"] == {"AttentionFLImpl": ATTENTION_LAYERS}
    assert report["native_layers"] == {}
    assert report["failed"] == {}


def test_with_experts_the_tokens_are_right_before_mistakes_and_after_them(
    results: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    first, *_, last = results["mistakes"]["steps"]
    assert first["tokens"] == last["tokens"] == expected[EXPERTS]


@pytest.mark.parametrize(("operator", "impl"), MISTAKES)
def test_a_mistake_changes_the_tokens(
    operator: str, impl: str, results: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    step = results["mistakes"]["steps"][1 + MISTAKES.index((operator, impl))]
    assert step["tokens"] != expected[EXPERTS]
    assert impl in ran(results["mistakes"], operator.partition("@")[0])


def test_a_request_that_was_preempted_goes_on_with_the_same_tokens(
    results: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    result = results["few blocks"]
    assert result["metrics"]["vllm:num_preemptions"] > 0
    assert [step["tokens"] for step in result["steps"]] == [expected[DENSE]] * 2


@pytest.mark.parametrize("way", DRAWN)
def test_however_it_runs_the_tokens_are_the_same(
    way: str, results: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    first, second = results[way]["steps"]
    assert first["tokens"] == second["tokens"] == expected[DENSE]
    for report in results[way]["reports"]:
        operators = {key.split(" ")[0] for key in report["counts"]}
        assert set(delta_net.OPERATORS) <= operators
        assert report["native_layers"] == {}
