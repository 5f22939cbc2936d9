"""An engine in several ranks gives Hugging Face's tokens, meets in our collectives, and refuses to diverge."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from serving import engine_arguments, python, start

LAYERS = 3
OPERATORS = {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"}
TENSOR = {"tp_size": 2}
PIPELINE = {"pp_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "tensor": {"engine": TENSOR},
    "tensor-flagcx": {"engine": TENSOR},
    "pipeline": {"engine": PIPELINE},
}
TENSOR_CASES = ("tensor", "tensor-flagcx")

Runs = dict[str, Future[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(checkpoint: Callable[[str], Path], standin: Callable[..., Path]) -> Runs:
    """An engine for each way to share the work."""
    libraries = {"tensor-flagcx": {"FLAGCX_PATH": str(standin())}}
    reference = {"SGLANG_FL_PREFER": "reference"}
    return {
        case: start(checkpoint("qwen3"), variables={**reference, **libraries.get(case, {})}, **options)
        for case, options in CASES.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_hugging_face(
    case: str, runs: Runs, expected: Callable[[str], list[list[int]]]
) -> None:
    assert runs[case].result()["steps"][0]["tokens"] == expected("qwen3")


def test_ranks_that_have_experts_of_their_own_give_the_same_tokens(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    found = start(checkpoint("qwen3_moe"), engine={**TENSOR, "ep_size": 2}).result()
    assert found["steps"][0]["tokens"] == expected("qwen3_moe")
    for report in found["reports"]:
        assert report["native_layers"] == report["undispatched"] == report["failed"] == {}


@pytest.mark.parametrize("case", CASES)
def test_each_rank_is_a_process_and_runs_every_operator_of_ours(case: str, runs: Runs) -> None:
    result = runs[case].result()
    first, second = result["reports"]
    assert len({first["pid"], second["pid"], result["pid"]}) == 3
    for report in (first, second):
        assert {key.split(" ")[0] for key in report["counts"]} == OPERATORS
        assert report["native_layers"] == report["fallen_through"] == report["undispatched"] == report["failed"] == {}


@pytest.mark.parametrize("case", TENSOR_CASES)
def test_tensor_parallel_ranks_run_alike_and_meet_in_our_collectives(case: str, runs: Runs) -> None:
    first, second = runs[case].result()["reports"]
    assert first["counts"] == second["counts"]
    calls = first["communication"]["tp:0"]
    assert calls == second["communication"]["tp:0"]
    passes, rest = divmod(calls["all_reduce"], 2 * LAYERS + 1)  # after attention, after the MLP, and the embedding
    assert rest == 0
    assert passes >= first["counts"]["silu_and_mul reference.torch"] // LAYERS > 0
    assert calls["all_gather"] > 0  # the logits


def test_the_engine_that_names_flagcx_communicates_through_it(runs: Runs) -> None:
    sentence = "communication runs through FlagCX, version code 12345"
    assert sentence in runs["tensor-flagcx"].result()["log"]
    assert sentence not in runs["tensor"].result()["log"]


def test_pipeline_stages_share_the_layers(runs: Runs) -> None:
    layers = [report["layers"]["SiluAndMul"] for report in runs["pipeline"].result()["reports"]]
    assert sum(layers) == LAYERS
    assert min(layers) > 0


def test_ranks_that_measure_a_kernel_differently_serve_with_one_configuration(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    variables = {
        "TRITON_INTERPRET": "1",
        "SGLANG_FL_PREFER": "reference",
        "SGLANG_FL_PLUGIN_MODULES": "timed_plugin",
        "SGLANG_FL_PER_OP": "silu_and_mul=vendor:timed",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    result = start(checkpoint("qwen3"), engine=TENSOR, variables=variables, cold=True).result()
    assert result["steps"][0]["tokens"] == expected("qwen3")
    assert "0 known from earlier starts; ranks had others in 1" in result["log"]
    (kept,) = json.loads((tmp_path / "fl-dispatch" / "tactics.json").read_text()).values()
    assert {words.partition(",")[0] for words in kept.popitem()[1].values()} == {"BLOCK: 64"}
    for rank in range(2):
        assert (tmp_path / f"rank{rank}.txt").read_text().startswith("BLOCK: 64,")


def ends(model: Path, engine: dict[str, Any], variables: dict[str, str]) -> str:
    """The whole log of an engine that must not answer."""
    arguments = engine_arguments(model, engine)
    request = {"input_ids": [[5, 6, 7]], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    ended = python(
        "-c", f"import sglang; print('answer', sglang.Engine(**{arguments}).generate(**{request}))", **variables
    )
    assert ended.returncode != 0
    assert "answer" not in ended.log.split()
    return ended.log


@pytest.mark.parametrize("engine", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_ranks_that_chose_differently_refuse_to_serve(
    engine: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    log = ends(checkpoint("llama"), engine, {"SGLANG_FL_PLUGIN_MODULES": "uneven_ranks"})
    chosen = "silu_and_mul: [[['reference.torch']], [['vendor.uneven', 'reference.torch']]] on ranks [0, 1]"
    assert "RankDivergenceError: the ranks chose different implementations" in log
    assert chosen in log


def test_an_implementation_that_fails_on_one_rank_while_serving_ends_the_engine(
    checkpoint: Callable[[str], Path],
) -> None:
    per_op = {"SGLANG_FL_PER_OP": "silu_and_mul=vendor:divergent|reference"}
    log = ends(checkpoint("llama"), TENSOR, {"SGLANG_FL_PLUGIN_MODULES": "divergent_plugin", **per_op})
    assert "'vendor.divergent' of 'silu_and_mul' failed (RuntimeError: only this rank fails)" in log
    assert "this rank runs in lockstep with others that did not fall back" in log
