"""A KV cache in fp8 in SGLang on a GPU, from graphs: what a network computes whose keys and values fp8 has rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from sglang_on_gpu import NEUTRAL, OURS, STEP, all_is_ours, answered, replayed, start, texts

from quantized_cache import COMPRESSED, OPERATORS, PLAIN, Cache
from quantized_network import distance
from running import MAX_TOKENS, PROMPTS, ran

pytestmark = pytest.mark.gpu
RUNS: Mapping[str, tuple[Cache, Mapping[str, Any]]] = {
    "scales of 1, pages of 16": (PLAIN, {"kv_cache_dtype": "fp8_e4m3", "page_size": 16}),
    "scales of a checkpoint": (COMPRESSED, {}),
}
each = pytest.mark.parametrize("name", RUNS)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    folder, runs = tmp_path_factory.mktemp("cache"), {}
    for name, (kept, engine) in RUNS.items():
        model = kept.checkpoint(folder / name.replace(" ", "-"))
        runs[name] = start(model, {**STEP, "scores": True}, STEP, engine=engine, variables=NEUTRAL)
    return lambda name: runs[name].result()


@pytest.fixture(scope="module")
def compared(answers: Callable[[str], dict[str, Any]]) -> Callable[[str], tuple[Any, Any, Any]]:
    """A run's texts, its log-probabilities, and what the network computes there."""

    @cache
    def of(name: str) -> tuple[Any, Any, Any]:
        told, got = answered(PROMPTS, answers(name)["steps"][0])
        return told, got, RUNS[name][0].computed(told)

    return of


@each
def test_it_computes_what_the_network_with_rounded_keys_and_values_does(
    name: str, compared: Callable[[str], tuple[Any, Any, Any]]
) -> None:
    told, got, right = compared(name)
    assert distance(got, right.scores) <= right.rounding
    for other, error in RUNS[name][0].distances_of_others(told, got).items():
        assert error > right.rounding, other


@each
def test_its_tokens_are_the_networks_where_rounding_does_not_decide(
    name: str, compared: Callable[[str], tuple[Any, Any, Any]]
) -> None:
    assert compared(name)[2].decides(PROMPTS, MAX_TOKENS)


@each
def test_answers_to_prompts_that_are_in_the_cache_are_the_networks_too(
    name: str, answers: Callable[[str], dict[str, Any]]
) -> None:
    """Other kernels read fewer new tokens, so rounding may decide otherwise than in the first pass."""
    _, again = answers(name)["steps"]
    assert max(again["cached"]) >= 320
    assert RUNS[name][0].computed(texts(again)).decides(PROMPTS, MAX_TOKENS)


@each
def test_our_kernels_ran_and_graphs_held_them(name: str, answers: Callable[[str], dict[str, Any]]) -> None:
    found = answers(name)
    assert all(ran(found, operator) == OURS for operator in OPERATORS)
    assert all_is_ours(found["report"])
    assert replayed(found["report"], 2 * (MAX_TOKENS - 1))
