"""Drafts beside sparse latent attention: each query of a step that checks them has a list of its own.

A predictor has an indexer of its own, whose lists nothing but the number of right drafts shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from serving import STEP, start

import drafters
from fl_dispatch.cli.checkpoints import build_checkpoint
from host_engines import WRONG
from latent_cache import chosen
from running import PROMPTS, expected_tokens
from sampling import drawn

pytest.importorskip("sglang")


class Run(NamedTuple):
    """The family, SGLang's name of the way to draft, its further arguments, and the size of a page."""

    family: str
    algorithm: str
    arguments: dict[str, Any]
    page: int = 1


TREE = {"speculative_eagle_topk": 2, "speculative_num_steps": 2, "speculative_num_draft_tokens": 5}
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
RUNS = {
    "predictor": Run("deepseek_v32", "NEXTN", {"speculative_num_steps": 1}, page=16),
    "several drafts": Run("glm_moe_dsa", "NEXTN", {"speculative_num_steps": 3}),
    "tree": Run("deepseek_v32", "NEXTN", TREE),
    "ngram": Run("glm_moe_dsa", "NGRAM", {"speculative_num_draft_tokens": 5}),
    "predictor of two ranks": Run("glm_moe_dsa", "NEXTN", {"speculative_num_steps": 2, "tp_size": 2}),
    "predictor over a cache in fp8": Run("glm_moe_dsa", "NEXTN", {"speculative_num_steps": 2, **FP8}),
    "tree over a cache in fp8": Run("deepseek_v32", "NEXTN", {**TREE, **FP8}),
    "ngram over a cache in fp8": Run("deepseek_v32", "NGRAM", {"speculative_num_draft_tokens": 5, **FP8}),
    "ngram of two ranks": Run("deepseek_v32", "NGRAM", {"speculative_num_draft_tokens": 5, "tp_size": 2}),
}
DRAWN = drawn(tuple(RUNS), 2, "drafts beside sparse latent attention under SGLang")
READERS = [method for method in DRAWN if RUNS[method].algorithm != "NGRAM"]
LONG: Mapping[str, Any] = {"prompts": drafters.TURNS, "max_tokens": drafters.LONG}
PREDICTOR = "model.decoder.self_attn.indexer"

each = pytest.mark.parametrize("method", DRAWN)


def _ordered(step: Mapping[str, Any], *operators: str) -> dict[str, Any]:
    orders = {operator: [f"impl:{WRONG}"] for operator in operators}
    return {**step, "policy": {"prefer": "reference", "per_op_order": orders}}


STEPS = (
    STEP,
    STEP,
    LONG,
    _ordered(LONG, f"index_topk@{PREDICTOR}"),
    _ordered(STEP, "index_topk"),
    _ordered(STEP, "mla_sparse"),
)
"""Two passes, long answers, the same with wrong lists of the predictor, and wrong implementations everywhere."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("readers")
    plain = {family: build_checkpoint(family, folder / family) for family in {run.family for run in RUNS.values()}}
    readers = {family: drafters.with_reader(model, folder / f"{family} reader") for family, model in plain.items()}
    looked_up = {family: drafters.repeating(model, folder / f"{family} repeating") for family, model in plain.items()}
    return {method: (readers if method in READERS else looked_up)[RUNS[method].family] for method in DRAWN}


@pytest.fixture(scope="module")
def result(models: Mapping[str, Path]) -> Callable[[str], dict[str, Any]]:
    """A method → :data:`STEPS`."""
    plugins = {"SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method", "SGLANG_FL_PREFER": "reference"}
    runs = {}
    for method in DRAWN:
        run, model = RUNS[method], models[method]
        drafter = {} if run.algorithm == "NGRAM" else {"speculative_draft_model_path": str(model)}
        engine = {
            **run.arguments,
            **drafter,
            "speculative_algorithm": run.algorithm,
            "page_size": run.page,
            "max_total_tokens": 8192,
        }
        runs[method] = start(model, *STEPS, variables=plugins, engine=engine)
    return lambda method: runs[method].result()


@each
def test_greedy_tokens_equal_hugging_face_in_chunks_and_from_the_radix_cache(
    method: str, result: Callable[[str], dict[str, Any]], models: Mapping[str, Path]
) -> None:
    first, second, long = result(method)["steps"][:3]
    assert first["tokens"] == second["tokens"] == _right(method, models, PROMPTS, first)
    assert first["cached"] == [0] * len(PROMPTS)
    assert second["cached"][2] > 300
    assert long["tokens"] == _right(method, models, drafters.TURNS, long)


@each
def test_a_wrong_implementation_changes_the_tokens(method: str, result: Callable[[str], dict[str, Any]]) -> None:
    first, *wrong = (result(method)["steps"][number]["tokens"] for number in (0, 4, 5))
    assert [tokens != first for tokens in wrong] == [True, True]


@each
def test_drafts_are_accepted(method: str, result: Callable[[str], dict[str, Any]]) -> None:
    assert _share(result(method)["steps"][2]) > 0


@pytest.mark.parametrize("method", READERS)
def test_a_predictor_that_reads_as_its_model_does_is_right_unless_its_lists_are_wrong(
    method: str, result: Callable[[str], dict[str, Any]]
) -> None:
    right, spoiled = result(method)["steps"][2:4]
    assert right["tokens"] == spoiled["tokens"]
    assert _share(right) > _share(spoiled) * 1.1


@each
def test_the_drafter_runs_our_operators_too(method: str, result: Callable[[str], dict[str, Any]]) -> None:
    report = result(method)["report"]
    assert report["native_layers"] == report["undispatched"] == report["failed"] == {}
    drafter = report["drafter"]
    assert drafter is None or drafter["native_layers"] == drafter["undispatched"] == {}


def _right(
    method: str, models: Mapping[str, Path], prompts: Sequence[list[int]], step: Mapping[str, Any]
) -> list[list[int]]:
    """Return Hugging Face's tokens; over a quantized cache what its network with rounded latents would choose."""
    model, found = models[method], step["tokens"]
    if RUNS[method].arguments.keys() & FP8:
        return chosen(model, prompts, found)
    return expected_tokens(model, prompts, len(found[0]))


def _share(step: Mapping[str, Any]) -> float:
    """How many drafts are right in each check."""
    checked, right = (sum(pair[part] for pair in step["drafts"]) for part in (0, 1))
    return right / checked
