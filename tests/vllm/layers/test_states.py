"""State spaces (Mamba 2) and short convolutions: Hugging Face's tokens by our operators, also from the prefix cache.

``test_architectures.py`` draws further models that have them beside attention, and ``test_delta_net.py`` is about the
delta rule. Wrong and forgetful implementations run as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, RUNNERS, STEP, Runs, expected_tokens, ran, start

from architectures import build_architecture
from sampling import drawn
from vllm_fl.layers import mamba2, short_conv

ALONE = {"mamba2": "MambaMixer2", "mamba": "MambaMixer", "falcon_mamba": "MambaMixer"}
"""Models without attention, and the class of their layers with a state."""
ALONE_DRAWN = drawn(tuple((name, runner) for name in ALONE for runner in RUNNERS), 2, "state spaces alone, and runners")
LAYERS = 4
"""Their layers with a state."""
SPACES, CONVOLUTIONS = ("granitemoehybrid", "jamba"), "lfm2"
(HYBRID, *_) = HYBRIDS = drawn(SPACES, 1, "state spaces beside attention")
PLUGINS = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin,forgetful_plugin", "VLLM_FL_DENY_VENDORS": "wrong,forgetful"}
ONE_LAYER = ("selective_state_update@model.layers.2.mamba", "vendor.wrong")
MISTAKES = {
    name: [
        *((operator, f"vendor.{how}") for operator in module.OPERATORS for how in ("wrong", "forgetful")),
        *([] if name == CONVOLUTIONS else [ONE_LAYER]),
        *([("rms_norm_gated", "vendor.wrong")] if name == "granitemoehybrid" else []),
    ]
    for name, module in (*((name, mamba2) for name in HYBRIDS), (CONVOLUTIONS, short_conv))
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "compiled": {"enforce_eager": False},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "chunks of 16 tokens, no prefix cache": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "one request at a time": {"max_num_seqs": 1},
}
DRAWN = drawn(
    (
        *((name, way) for name in SPACES for way in WAYS if (name, way) != ("granitemoehybrid", "two stages")),
        (CONVOLUTIONS, "two stages"),
        ("mamba", "two ranks"),
    ),
    1,
    "ways to run a state space",
)
"""vLLM's loader of Granite's experts knows no stages."""
FEW_BLOCKS = {"num_gpu_blocks_override": 20, "max_model_len": 352}
"""So few that a request has to give its states up while it generates."""


def _with(**per_op: list[str]) -> dict[str, Any]:
    return {**STEP, "policy": {"prefer": "reference", "per_op_order": per_op}, "reset": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("states")
    names = {name for name, _ in (*ALONE_DRAWN, *DRAWN)} | {*MISTAKES}
    return {name: build_architecture(name, root / name) for name in names}


@pytest.fixture(scope="module")
def expected(models: Mapping[str, Path]) -> Mapping[str, Any]:
    return {name: expected_tokens(path) for name, path in models.items()}


@pytest.fixture(scope="module")
def results(models: Mapping[str, Path]) -> Mapping[str, Any]:
    """Three passes on each runner, passes with mistakes between right ones, and other ways to run."""
    cached = {"enable_prefix_caching": True}  # which vLLM leaves off for a model without attention
    mistakes = {
        name: [_with(**{operator: [f"impl:{impl}"]}) for operator, impl in made] for name, made in MISTAKES.items()
    }
    return Runs(
        {
            **{
                (name, runner): start(models[name], STEP, STEP, STEP, variables=RUNNERS[runner], engine=cached)
                for name, runner in ALONE_DRAWN
            },
            **{
                name: start(models[name], STEP, STEP, *made, _with(), variables=PLUGINS)
                for name, made in mistakes.items()
            },
            "few blocks": start(models[HYBRID], STEP, STEP, engine=FEW_BLOCKS),
            **{(name, way): start(models[name], STEP, STEP, engine=dict(WAYS[way])) for name, way in DRAWN},
        }
    )


@pytest.mark.parametrize(("name", "runner"), ALONE_DRAWN)
def test_without_attention_tokens_equal_hugging_face_also_from_the_prefix_cache_and_again(
    name: str, runner: str, results: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    result = results[name, runner]
    assert [step["tokens"] for step in result["steps"]] == [expected[name]] * 3
    first, *later = (step["cached"] for step in result["steps"])
    assert first == [0] * len(PROMPTS)
    longest = max(range(len(PROMPTS)), key=lambda index: len(PROMPTS[index]))
    assert all(cached[longest] > 0 for cached in later)
    assert result["report"]["model_runner"] == runner


@pytest.mark.parametrize(("name", "runner"), ALONE_DRAWN)
def test_every_operator_runs_once_a_layer_and_step_and_no_layer_is_native(
    name: str, runner: str, results: Mapping[str, Any]
) -> None:
    report = results[name, runner]["report"]
    calls = {key.split(" ")[0]: count for key, count in report["counts"].items()}
    scans = calls["selective_scan"] + calls["selective_state_update"]
    inside = 3 * scans if name == "falcon_mamba" else 0  # norms of a step and of both sides of a state
    steps, rest = divmod(calls["rms_norm"] - inside, LAYERS + 1)
    assert rest == 0
    assert calls.get("rms_norm_gated", 0) == (LAYERS * steps if name == "mamba2" else 0)
    assert calls["causal_conv1d"] == calls["selective_scan"]
    assert calls["causal_conv1d_update"] == calls["selective_state_update"]
    assert LAYERS * steps <= scans
    assert calls["selective_state_update"] >= LAYERS * 3 * (MAX_TOKENS - 1)
    assert report["layers"][ALONE[name]] == LAYERS
    assert report["layers"].get("Mixer2RMSNormGated", 0) == (LAYERS if name == "mamba2" else 0)
    assert report["native_layers"] == {}
    assert report["failed"] == {}


@pytest.mark.parametrize("name", MISTAKES)
def test_beside_attention_the_tokens_are_right_also_from_the_prefix_cache_and_after_mistakes(
    name: str, results: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    first, second, *_, last = results[name]["steps"]
    assert first["tokens"] == second["tokens"] == last["tokens"] == expected[name]
    assert max(second["cached"]) > 0
    assert results[name]["report"]["native_layers"] == {}


@pytest.mark.parametrize(
    ("name", "operator", "impl"), [(name, *mistake) for name, made in MISTAKES.items() for mistake in made]
)
def test_a_mistake_changes_the_tokens(
    name: str, operator: str, impl: str, results: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    step = results[name]["steps"][2 + MISTAKES[name].index((operator, impl))]
    assert step["tokens"] != expected[name]
    assert impl in ran(results[name], operator.partition("@")[0])


def test_a_request_that_was_preempted_goes_on_with_the_same_tokens(
    results: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    result = results["few blocks"]
    assert result["metrics"]["vllm:num_preemptions"] > 0
    assert [step["tokens"] for step in result["steps"]] == [expected[HYBRID]] * 2


@pytest.mark.parametrize(("name", "way"), DRAWN)
def test_however_it_runs_the_tokens_are_the_same(
    name: str, way: str, results: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    first, second = results[name, way]["steps"]
    assert first["tokens"] == second["tokens"] == expected[name]
    norms_over_ranks = {"Mixer2RMSNormGated": 2} if (name, way) == ("granitemoehybrid", "two ranks") else {}
    for report in results[name, way]["reports"]:
        operators = {key.split(" ")[0] for key in report["counts"]}
        assert set((short_conv if name == CONVOLUTIONS else mamba2).OPERATORS) <= operators
        assert report["native_layers"] == norms_over_ranks
