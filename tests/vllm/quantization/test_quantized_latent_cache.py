"""A latent cache in fp8: an engine computes what Hugging Face's network does whose latents are rounded so.

A step of several tokens of a request reads their own latents as they are, and those before them from the cache; a step
of one token reads all of them from the cache. One request runs at a time, so each step's tokens are known. Layers have
scales of their own, which are set in the engine, because no checkpoint that vLLM serves here brings any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import MAX_TOKENS, PROMPTS, SCORED_STEP, WRONG_IF_ASKED, ran, start_features
from torch import Tensor

from latent_cache import (
    ALL_ONE,
    BLOCK,
    ENGINE,
    OPERATORS,
    PLANTED,
    SCALES,
    behind,
    is_as_near_in_bfloat16,
    others,
    rounded,
)
from quantized_mixture import LATENT_LAYERS, latent
from quantized_network import Computed, answered, computed, distance

pytestmark = pytest.mark.engine
AGAIN: Mapping[str, Any] = {**SCORED_STEP, "sampling": {"max_tokens": MAX_TOKENS, "logprobs": 0}}
"""Prompts whose log-probabilities are asked for are computed anew; these are found."""
EXTENDED = {**ENGINE, "worker_extension_cls": "worker_extension.TrainerExtension"}


class Run(NamedTuple):
    """An engine with such a cache: the layers' scales, and its arguments."""

    scales: tuple[float, ...]
    engine: Mapping[str, Any]


ONES, SCALED, COMPILED, HALF = "scales of 1", "a scale for each layer", "compiled", "bfloat16"
RUNS = {
    ONES: Run(ALL_ONE, ENGINE),
    SCALED: Run(SCALES, EXTENDED),
    COMPILED: Run(SCALES, {**EXTENDED, "enforce_eager": False}),
    HALF: Run(ALL_ONE, {**ENGINE, "kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}),
}
SINGLE = [ONES, SCALED, COMPILED]
single = pytest.mark.parametrize("name", SINGLE)
each = pytest.mark.parametrize("name", RUNS)


def steps(name: str) -> list[Mapping[str, Any]]:
    """A right pass, one that finds its prompts in the cache; and with scales one that reads with others than it wrote.

    One for each operator with a wrong implementation follows, if choices are not frozen.
    """
    made: list[Mapping[str, Any]] = [SCORED_STEP, AGAIN]
    if RUNS[name].scales == SCALES:
        made.insert(0, {"do": "rpc", "method": "set_latent_scales", "args": [SCALES]})
        made.append({"do": "rpc", "method": "set_latent_scales", "args": [[PLANTED * scale for scale in SCALES]]})
        made.append(AGAIN)
    for operator in OPERATORS if name == ONES else ():
        wrong = {"do": "policy", "prefer": "reference", "per_op_order": {operator: ["impl:vendor.wrong"]}}
        made += [{"do": "reset_prefix_cache"}, wrong, SCORED_STEP]
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return latent(tmp_path_factory.mktemp("latent") / "whole")


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[str, Any]:
    found = start_features(*((model, steps(name), run.engine) for name, run in RUNS.items()), **WRONG_IF_ASKED)
    return dict(zip(RUNS, found.result()["runs"], strict=True))


@pytest.fixture(scope="module")
def passes(answers: dict[str, Any]) -> Callable[[str], list[Any]]:
    """The answers of a run's passes."""
    return lambda name: [step for step in answers[name]["steps"] if isinstance(step, list) and step[0]]


@pytest.fixture(scope="module")
def right(model: Path, passes: Callable[[str], Any]) -> Callable[[str], tuple[list[list[int]], Tensor, Computed]]:
    """A run's texts, its log-probabilities, and what the network computes there."""

    @cache
    def of(name: str) -> tuple[list[list[int]], Tensor, Computed]:
        texts, got = answered(PROMPTS, passes(name)[0])
        return texts, got, computed(rounded(model, RUNS[name].scales), texts)

    return of


@single
def test_it_computes_what_the_network_with_rounded_latents_does(
    name: str, right: Callable[[str], Any], model: Path
) -> None:
    texts, got, there = right(name)
    assert distance(got, there.scores) <= there.rounding
    for other, wrong in others(model, RUNS[name].scales, texts).items():
        assert distance(got, wrong) > there.rounding, other
    assert there.decides(PROMPTS, MAX_TOKENS)


@single
def test_a_prompt_found_in_the_cache_is_read_as_it_was_stored(
    name: str, right: Callable[[str], Any], passes: Callable[[str], Any], model: Path
) -> None:
    """Prompts of one block and more: what they are read with, and answered from it; not so with other scales."""
    _, _, there = right(name)
    first, again, *planted = passes(name)[: 3 if RUNS[name].scales == SCALES else 2]
    assert [one["cached"] for one in first] == [0] * len(PROMPTS)
    assert [one["cached"] for one in again] == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
    assert behind(model, RUNS[name].scales, again) <= 2 * there.largest
    for wrong in planted:
        assert behind(model, RUNS[name].scales, wrong) > 2 * there.largest


def test_in_bfloat16_it_is_as_near_as_hugging_faces_network(model: Path, passes: Callable[[str], Any]) -> None:
    assert is_as_near_in_bfloat16(model, *answered(PROMPTS, passes(HALF)[0]))


@each
def test_the_operators_ran_on_it(name: str, answers: dict[str, Any]) -> None:
    report = answers[name]["report"]
    assert all(ran(answers[name], operator) - {"vendor.wrong"} for operator in OPERATORS)
    assert report["attention"] == {"MLAFLImpl": LATENT_LAYERS}
    assert not report["native_layers"]
    assert not report["failed"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_wrong_implementation_changes_the_tokens(operator: str, passes: Callable[[str], Any]) -> None:
    first, _, *wrong = passes(ONES)
    assert [one["tokens"] for one in wrong[OPERATORS.index(operator)]] != [one["tokens"] for one in first]
