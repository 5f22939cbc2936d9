"""A quantized KV cache: an engine computes what Hugging Face's network does whose keys and values are rounded so.

Engines start one after the other in one process. Prompts are read in chunks, and a second pass finds them in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, SCORED_STEP, WRONG_IF_ASKED, ran, start_features
from torch import Tensor

from quantized_cache import COMPRESSED, FP8, INT8, OPERATORS, PLAIN, Cache
from quantized_network import Computed, answered, distance
from sampling import drawn

pytestmark = pytest.mark.engine
SAMPLING = {"max_tokens": MAX_TOKENS, "logprobs": 0}
AGAIN: Mapping[str, Any] = {"do": "generate", "prompts": PROMPTS, "sampling": SAMPLING}
"""Prompts whose log-probabilities are asked for are computed anew; these are found."""
HEAD, SCALE = 128, 4
"""Elements of a head of the small model, and bytes of a scale in int8."""


@dataclass(frozen=True, eq=False)
class Run:
    """An engine with such a cache; ``engine``: further arguments of ``LLM``."""

    name: str
    cache: Cache = PLAIN
    engine: Mapping[str, Any] = field(default_factory=lambda: {"kv_cache_dtype": "fp8"})

    def __str__(self) -> str:
        return self.name


EAGER = Run("eager")
HALF = Run("bfloat16", engine={"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"})
SCALED = Run("scales of a compressed-tensors checkpoint, compiled", COMPRESSED, {"enforce_eager": False})
OWN_SCALES = Run("scales of an fp8 checkpoint", FP8)
TOKENS = Run("int8, a scale for each token and head", INT8, {"kv_cache_dtype": "int8_per_token_head"})
TOKENS_HALF = Run("int8, bfloat16", INT8, {**TOKENS.engine, "dtype": "bfloat16"})
FLOAT = Run("not quantized", engine={"kv_cache_dtype": "auto"})
SINGLE = [EAGER, TOKENS, *drawn((SCALED, OWN_SCALES), 1, "scales of a cache")]
HALVES = [HALF, TOKENS_HALF]
RUNS = [*SINGLE, *HALVES]
single = pytest.mark.parametrize("run", SINGLE, ids=str)
each_half = pytest.mark.parametrize("run", HALVES, ids=str)
each_run = pytest.mark.parametrize("run", RUNS, ids=str)


def steps(run: Run) -> list[Mapping[str, Any]]:
    """A right pass, one that finds its prompts in the cache; and one for each operator with a wrong implementation."""
    made = [SCORED_STEP, AGAIN, {"do": "blocks"}]
    for operator in OPERATORS if run in (EAGER, TOKENS) else ():
        wrong = {"do": "policy", "prefer": "reference", "per_op_order": {operator: ["impl:vendor.wrong"]}}
        made += [{"do": "reset_prefix_cache"}, wrong, SCORED_STEP]
    return made


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Run, Any]:
    folder = tmp_path_factory.mktemp("cache")
    made = ((run.cache.checkpoint(folder / run.name.replace(" ", "-")), steps(run), run.engine) for run in RUNS)
    found = start_features(
        *made, (PLAIN.checkpoint(folder), [{"do": "blocks"}], FLOAT.engine), **WRONG_IF_ASKED
    ).result()
    return dict(zip([*RUNS, FLOAT], found["runs"], strict=True))


@pytest.fixture(scope="module")
def right(answers: dict[Run, Any]) -> Callable[[Run], tuple[Tensor, Computed, list[list[int]]]]:
    """A run's log-probabilities, what the network computes there, and the texts."""

    @cache
    def of(run: Run) -> tuple[Tensor, Computed, list[list[int]]]:
        texts, got = answered(PROMPTS, answers[run]["steps"][0])
        return got, run.cache.computed(texts), texts

    return of


@single
def test_it_computes_what_the_network_with_rounded_keys_and_values_does(run: Run, right: Callable[[Run], Any]) -> None:
    got, there, texts = right(run)
    assert distance(got, there.scores) <= there.rounding
    for other, error in run.cache.distances_of_others(texts, got).items():
        assert error > there.rounding, other


@single
def test_its_tokens_are_the_networks_where_rounding_does_not_decide(run: Run, right: Callable[[Run], Any]) -> None:
    _, there, _ = right(run)
    assert there.decides(PROMPTS, MAX_TOKENS)


@each_half
def test_in_bfloat16_it_is_as_near_as_hugging_faces_network(run: Run, answers: dict[Run, Any]) -> None:
    assert run.cache.is_as_near_in_bfloat16(*answered(PROMPTS, answers[run]["steps"][0]))


@each_run
def test_a_prompt_found_in_the_cache_has_the_same_answer(run: Run, answers: dict[Run, Any]) -> None:
    first, again = answers[run]["steps"][:2]
    assert [one["cached"] for one in first] == [0] * len(PROMPTS)
    assert max(one["cached"] for one in again) >= 320
    if run not in HALVES:
        assert [one["tokens"] for one in again] == [one["tokens"] for one in first]


@pytest.mark.parametrize(("run", "of_an_element"), [(EAGER, 1), (TOKENS, 1 + SCALE / HEAD)], ids=str)
def test_more_blocks_fit_into_its_memory(run: Run, of_an_element: float, answers: dict[Run, Any]) -> None:
    """As many more as a number in float32 takes more bytes than one in the cache with its part of the scale."""
    got, plain = (answers[each]["steps"][place] for each, place in ((run, 2), (FLOAT, 0)))
    assert got == pytest.approx(plain * 4 / of_an_element, rel=0.01)


@each_run
def test_the_operators_ran_on_a_quantized_cache(run: Run, answers: dict[Run, Any]) -> None:
    assert all(ran(answers[run], operator) - {"vendor.wrong"} for operator in OPERATORS)
    assert not answers[run]["report"]["native_layers"]
    assert not answers[run]["report"]["failed"]


@pytest.mark.parametrize("run", [EAGER, TOKENS], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_wrong_implementation_changes_the_tokens(operator: str, run: Run, answers: dict[Run, Any]) -> None:
    first, _, *others = (step for step in answers[run]["steps"] if isinstance(step, list))
    wrong = others[OPERATORS.index(operator)]
    assert [one["tokens"] for one in wrong] != [one["tokens"] for one in first]
