"""Norms and gated activations of quantized models: compiled graphs call one operator for them and the quantization.

No CPU has an implementation of such an operator but the reference, so a plugin brings one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, Runs, ran, start_compiled, start_features

import quantized_checkpoints as checkpoints
from quantized_checkpoints import SCHEMES
from quantized_engines import Rules, Run, comparisons
from quantized_network import Comparison, answered
from sampling import drawn

pytestmark = pytest.mark.engine
JOINED = ("rms_norm_quantize", "silu_and_mul_quantize")
COMPILED: Mapping[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": "VLLM_COMPILE", "backend": "inductor"},
}
KINDS = ("compressed-tensors W8A8 int8", "fp8, blocks of 128", "compressed-tensors W8A8 int8, static")
RUNS = [Run(name, COMPILED, "joined") for name in drawn(KINDS, 1, "quantized rows, joined")]
each_run = pytest.mark.parametrize("run", RUNS, ids=str)
WRONG = drawn(JOINED, 1, "wrong joined operators")[0]
ASKED: Mapping[str, Any] = {
    "do": "generate",
    "prompts": PROMPTS,
    "sampling": {"max_tokens": MAX_TOKENS, "logprobs": 0, "prompt_logprobs": 0},
}
LAYERS = 4
DISTINCT = 3
"""Compiled pieces: the first, the last, and those between two layers, which are equal."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("joined")
    return cache(lambda name: checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name]))


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Run, Any]]:
    """Engines that join, and engines whose joined operator is wrong."""

    def start(**variables: str) -> Any:
        runs = ((checkpoint(run.scheme), [ASKED], run.engine) for run in RUNS)
        cache = str(tmp_path_factory.mktemp("cache"))
        return start_features(
            *runs, VLLM_CACHE_ROOT=cache, VLLM_FL_PLUGIN_MODULES="joined_plugin,wrong_plugin", **variables
        )

    started = {
        "right": start(VLLM_FL_DENY_VENDORS="wrong"),
        "wrong": start(VLLM_FL_PER_OP=f"{WRONG}=impl:vendor.wrong"),
    }
    return {name: dict(zip(RUNS, run.result()["runs"], strict=True)) for name, run in started.items()}


@pytest.fixture(scope="module")
def compared(answers: dict[str, dict[Run, Any]]) -> Callable[[Run], Comparison]:
    return comparisons(lambda run: answered(PROMPTS, answers["right"][run]["steps"][0]))


@each_run
class TestNumbers(Rules):
    """They are right."""


@each_run
def test_graphs_call_the_joined_operators(run: Run, answers: dict[str, dict[Run, Any]]) -> None:
    assert all(ran(answers["right"][run], operator) == {"vendor.joined"} for operator in JOINED)
    assert answers["right"][run]["report"]["failed"] == {}


@each_run
def test_only_the_attentions_result_is_quantized_by_itself(run: Run, answers: dict[str, dict[Run, Any]]) -> None:
    """A layer has four products, and the results of two norms and of its activation are quantized beside."""
    calls: Counter[str] = Counter()
    for key, count in answers["right"][run]["report"]["counts"].items():
        calls[key.split(" ")[0]] += count
    once = calls["quantize"]
    assert once
    assert calls["rms_norm_quantize"] == 2 * once
    assert calls["silu_and_mul_quantize"] == once
    assert calls["scaled_linear"] == 4 * once


@each_run
def test_equal_layers_are_compiled_once(run: Run, answers: dict[str, dict[Run, Any]]) -> None:
    compiled = answers["right"][run]["report"]["compiled"]
    assert (compiled["pieces"], compiled["distinct"]) == (LAYERS + 1, DISTINCT)


@each_run
def test_a_wrong_joined_operator_is_in_the_graph(run: Run, answers: dict[str, dict[Run, Any]]) -> None:
    wrong = answers["wrong"][run]
    assert ran(wrong, WRONG) == {"vendor.wrong"}
    assert not comparisons(lambda one: answered(PROMPTS, wrong["steps"][0]))(run).agrees


# -- where they stay apart --------------------------------------------------------------------------------------------

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "the host's switches": {"deny_vendors": ["wrong"]},
    "a rule for a part": {"deny_vendors": ["wrong"], "per_op_order": {"quantize": ["reference"]}},
    "nothing but references": {"deny_vendors": ["wrong", "joined"]},
}


@pytest.fixture(scope="module")
def apart(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    engines = {}
    for name, policy in POLICIES.items():
        config = dict(COMPILED["compilation_config"])
        if name == "the host's switches":
            config["pass_config"] = {"fuse_norm_quant": False, "fuse_act_quant": False}
        arguments = {"enforce_eager": False, "compilation_config": config}
        engines[name] = {"model": checkpoint(RUNS[0].scheme), "engine": arguments, "policy": policy}
    cache = str(tmp_path_factory.mktemp("apart"))
    return Runs(start_compiled(engines, VLLM_CACHE_ROOT=cache, VLLM_FL_PLUGIN_MODULES="joined_plugin,wrong_plugin"))


@pytest.mark.parametrize("name", POLICIES)
def test_they_stay_apart_if_the_user_says_so_or_nothing_is_faster(name: str, apart: Mapping[str, Any]) -> None:
    assert not any(ran(apart[name], operator) for operator in JOINED)
    assert ran(apart[name], "quantize")
    assert apart[name]["report"]["compiled"]["distinct"] == DISTINCT
