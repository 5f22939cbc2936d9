"""An engine in several processes gives Hugging Face's tokens: tensor, pipeline, data, expert parallel, and on Ray."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engines import OTHER_HOSTS, Runs, ran, start, start_data_parallel, start_on_ray

from sampling import drawn

RAY = Path(__file__).parents[3] / ".venv-hosts/ray"
WITH_RAY = ["ray"] if "Ray" in OTHER_HOSTS and RAY.exists() else []
LAYERS = 3
SHAPES = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}
METHODS = ("spawn", "fork")
COLD = "tensor-spawn"
"""Its processes are really started, as a user's."""
CASES = [f"{shape}-{method}" for shape in SHAPES for method in METHODS]
MORE = {
    "four ranks": {"tensor_parallel_size": 4},  # more than there are heads of keys
    "three stages": {"pipeline_parallel_size": 3},
    "two stages of two ranks": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
"""More than two ranks of a kind, or of both."""
DRAWN = drawn(tuple(MORE), 1, "more than two ranks")
OVER_LOOPBACK, ABSENT = "tensor-fork", "absent0"
"""The case whose ranks meet over the interface ``lo``; the name of an interface that no machine has."""
FORK = {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_FL_PREFER": "reference"}
RULES = [f"rms_norm@model.layers.{number}.*" for number in (0, LAYERS - 1, LAYERS)]
"""Rules for a layer of the first stage, of the last one, of none."""
OPERATORS = {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"}
ON_RAY = {"VLLM_FL_PER_OP": "silu_and_mul=impl:vendor.probe|reference", "VLLM_FL_PLUGIN_MODULES": "probe_plugin"}


@pytest.fixture(scope="session")
def runs(checkpoint: Callable[[str], Path]) -> Runs:
    """An engine for each way to share the work; for tensors and stages, one for each way to start a process."""
    model = checkpoint("qwen3")

    def share(case: str) -> Future[dict[str, Any]]:
        shape, _, method = case.partition("-")
        variables = {"VLLM_WORKER_MULTIPROC_METHOD": method, "VLLM_FL_PREFER": "reference"}
        if case == OVER_LOOPBACK:
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        rules = {"VLLM_FL_PER_OP": ";".join(f"{rule}=reference" for rule in RULES)} if shape == "pipeline" else {}
        return start(model, engine=SHAPES[shape], variables={**variables, **rules}, cold=case == COLD)

    return Runs(
        {
            **{case: share(case) for case in CASES},
            "data": start_data_parallel(model),
            **{case: start(model, engine=MORE[case], variables=FORK) for case in DRAWN},
            ABSENT: start(model, engine=SHAPES["tensor"], variables={**FORK, "GLOO_SOCKET_IFNAME": ABSENT}),
            "experts": start_data_parallel(checkpoint("qwen3_moe"), enable_expert_parallel=True),
            **{case: start_on_ray(model, RAY, **ON_RAY) for case in WITH_RAY},
        }
    )


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_hugging_face(
    case: str, runs: Runs, expected: Callable[[str], list[list[int]]]
) -> None:
    assert runs[case]["steps"][0]["tokens"] == expected("qwen3")


@pytest.mark.parametrize("case", CASES)
def test_each_worker_is_a_process_and_runs_every_operator_of_ours(case: str, runs: Runs) -> None:
    result = runs[case]
    first, second = result["reports"]
    assert len({first["pid"], second["pid"], result["pid"]}) == 3
    for report in (first, second):
        assert {key.split(" ")[0] for key in report["counts"]} == OPERATORS
        assert report["native_layers"] == {}
        assert report["failed"] == {}


@pytest.mark.parametrize("case", DRAWN)
def test_more_than_two_ranks_give_the_same_tokens(
    case: str, runs: Runs, expected: Callable[[str], list[list[int]]]
) -> None:
    reports, shape = runs[case]["reports"], MORE[case]
    assert runs[case]["steps"][0]["tokens"] == expected("qwen3")
    assert len({report["pid"] for report in reports}) == math.prod(shape.values())
    assert all({key.split(" ")[0] for key in report["counts"]} == OPERATORS for report in reports)


def test_ranks_meet_over_the_interface_that_gloos_variable_names(
    runs: Runs, expected: Callable[[str], list[list[int]]]
) -> None:
    assert runs[OVER_LOOPBACK]["steps"][0]["tokens"] == expected("qwen3")
    with pytest.raises(AssertionError, match=ABSENT):
        runs[ABSENT]


@pytest.mark.parametrize("method", METHODS)
def test_tensor_parallel_ranks_run_alike_and_meet_in_our_communicator(method: str, runs: Runs) -> None:
    first, second = runs[f"tensor-{method}"]["reports"]
    assert first["counts"] == second["counts"]
    calls = first["communication"]["tp:0"]
    assert calls == second["communication"]["tp:0"]
    passes, rest = divmod(calls["all_reduce"], 2 * LAYERS + 1)  # after attention, after the MLP, and the embedding
    assert rest == 0
    assert passes >= first["counts"]["silu_and_mul reference.torch"] // LAYERS > 0
    assert calls["all_gather"] > 0  # the logits


@pytest.mark.parametrize("method", METHODS)
def test_pipeline_stages_share_the_layers(method: str, runs: Runs) -> None:
    layers = [report["layers"]["SiluAndMul"] for report in runs[f"pipeline-{method}"]["reports"]]
    assert sum(layers) == LAYERS
    assert min(layers) > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_rule_for_layers_of_one_stage_is_no_mistake_and_one_for_no_layer_at_all_is_told_once(
    method: str, runs: Runs
) -> None:
    log = runs[f"pipeline-{method}"]["log"]
    assert [log.count(f"'{rule}' fits no layer") for rule in RULES] == [0, 0, 1]


def test_data_parallel_ranks_each_give_the_tokens_of_hugging_face_with_our_operators(
    runs: Runs, expected: Callable[[str], list[list[int]]]
) -> None:
    result = runs["data"]
    assert result["tokens"] == [expected("qwen3")] * 2
    first, second = result["reports"]
    assert first["pid"] != second["pid"]
    for report in (first, second):
        assert {key.split(" ")[0] for key in report["counts"]} == OPERATORS | {"linear"}
        assert report["native_layers"] == {}


def test_two_ranks_with_half_of_the_experts_each_exchange_tokens_through_our_communicator(
    runs: Runs, expected: Callable[[str], list[list[int]]]
) -> None:
    result = runs["experts"]
    assert result["tokens"] == [expected("qwen3_moe")] * 2
    for report in result["reports"]:
        calls = report["communication"]["ep:0"]
        experts = sum(count for key, count in report["counts"].items() if key.startswith("fused_moe "))
        assert calls["dispatch"] == calls["combine"] >= experts > 0
        exchanged = {"all_gather": 3 * calls["dispatch"], "reduce_scatter": calls["combine"]}
        assert report["communication"]["dp:0"] == exchanged


@pytest.mark.parametrize("case", WITH_RAY)
def test_workers_of_ray_have_our_settings_and_give_the_tokens_of_hugging_face(
    case: str, runs: Runs, expected: Callable[[str], list[list[int]]]
) -> None:
    result = runs[case]
    assert result["steps"][0]["tokens"] == expected("qwen3")
    assert len({report["pid"] for report in result["reports"]} | {result["pid"]}) == 3
    for report in result["reports"]:
        assert ran({"report": report}, "silu_and_mul") == {"vendor.probe"}
        assert report["native_layers"] == {}
