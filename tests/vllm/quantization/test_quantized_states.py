"""Quantized models whose layers keep a state: what the dequantized network computes, by our operators.

As :mod:`test_quantized`, with the models of :mod:`quantized_states`: delta nets beside attention with experts and
without, state spaces alone and beside attention, and short convolutions. The convolutions, the decays and the small
products of gates are as published checkpoints leave them, not quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, SCORED_STEP, WRONG_IF_ASKED, ran, start_features

import quantized_checkpoints as checkpoints
from quantized_checkpoints import SCHEMES
from quantized_engines import Rules, comparisons
from quantized_mixture import experts_kernel, operator
from quantized_network import Comparison, answered
from quantized_states import EXPERT_LAYERS, PRODUCTS, SCHEMES_OF_STATES, SIZES, Run, build, planted
from sampling import drawn
from vllm_fl.layers import delta_net, mamba2, short_conv

pytestmark = pytest.mark.engine

REFUSED = {("granitemoehybrid", "gptq"), ("mamba2", "gptq")}
"""Pairs that end while they load: vLLM looks Granite's layers up by another name, and loads no ``g_idx`` of Mamba 2."""
PAIRS = [(name, scheme) for name in SIZES for scheme in SCHEMES_OF_STATES if (name, scheme) not in REFUSED]
EAGER = [Run(scheme, kind="eager", model=name) for name, scheme in drawn(PAIRS, 2, "quantized states")]
COMPILED = [
    Run(scheme, {"enforce_eager": False}, "compiled", name)
    for name, scheme in drawn(PAIRS, 1, "quantized states, compiled")
]
RANKS = [
    Run(scheme, {"tensor_parallel_size": 2}, "two ranks", name)
    for name, scheme in drawn([("qwen3_5", "fp8"), ("lfm2", "awq")], 0, "quantized states, ranks")
]
RUNS = [*EAGER, *COMPILED, *RANKS]
each_run = pytest.mark.parametrize("run", RUNS, ids=str)
WRONG = drawn([("qwen3_5", "fp8"), ("mamba2", "compressed-tensors W4A16")], 1, "wrong scales of a part")
each_wrong = pytest.mark.parametrize(("name", "scheme"), WRONG)
OPERATORS = {
    "qwen3_5": delta_net.OPERATORS,
    "qwen3_next": delta_net.OPERATORS,
    "mamba2": mamba2.OPERATORS,
    "granitemoehybrid": mamba2.OPERATORS,
    "lfm2": short_conv.OPERATORS,
}


def steps(run: Run) -> list[Mapping[str, Any]]:
    """A right pass; and where choices are not frozen, one with a wrong implementation of the products."""
    wrong = {"do": "policy", "prefer": "reference", "per_op_order": {run.made.operators[-1]: ["impl:vendor.wrong"]}}
    return [SCORED_STEP, *(({"do": "reset_prefix_cache"}, wrong, SCORED_STEP) if run in EAGER else ())]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("states")
    return cache(lambda name: build(name, folder / name))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, model: Callable[[str], Path]) -> Callable[[str, str], Path]:
    folder = tmp_path_factory.mktemp("quantized")

    @cache
    def made(name: str, scheme: str) -> Path:
        place = folder / f"{name} {scheme}".replace(" ", "-")
        return checkpoints.write_checkpoint(place, SCHEMES[scheme], model=model(name))

    return made


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("wrong scales")
    mistaken = [(planted(name, checkpoint(name, scheme), folder / name), [SCORED_STEP], {}) for name, scheme in WRONG]

    def served(runs: Sequence[Run]) -> list[Any]:
        return [(checkpoint(run.model, run.scheme), steps(run), run.engine) for run in runs]

    kinds = [[*served(EAGER), *mistaken], *([one] for one in served([*COMPILED, *RANKS]))]
    begun = [start_features(*kind, **WRONG_IF_ASKED) for kind in kinds]
    found = [one for kind in begun for one in kind.result()["runs"]]
    return dict(zip([*EAGER, *WRONG, *COMPILED, *RANKS], found, strict=True))


@pytest.fixture(scope="module")
def compared(answers: dict[Any, Any], model: Callable[[str], Path]) -> Callable[[Run], Comparison]:
    @cache
    def beside(name: str) -> Callable[[Any], Comparison]:
        return comparisons(lambda run: answered(PROMPTS, answers[run]["steps"][0]), model(name))

    return lambda run: beside(run.model)(run)


@each_run
class TestNumbers(Rules):
    """They are right."""


@each_run
def test_its_products_states_and_experts_are_all_ours(run: Run, answers: dict[Any, Any]) -> None:
    report = answers[run]["report"]
    assert report["layers"][run.made.layer] == PRODUCTS[run.model]
    assert not report["native_layers"]
    experts = EXPERT_LAYERS.get(run.model, 0)
    assert report["layers"].get(experts_kernel(run.scheme), 0) == experts
    operators = (*run.made.operators, *OPERATORS[run.model], *([operator(run.made)] if experts else []))
    assert all(ran(answers[run], name) - {"vendor.wrong"} for name in operators)


@pytest.mark.parametrize("run", EAGER, ids=str)
def test_a_wrong_product_changes_what_it_computes(run: Run, answers: dict[Any, Any]) -> None:
    first, wrong = (step for step in answers[run]["steps"] if isinstance(step, list))
    assert [one["tokens"] for one in wrong] != [one["tokens"] for one in first]


@each_wrong
def test_a_wrong_scale_of_one_part_of_a_joined_product_shows(
    name: str, scheme: str, answers: dict[Any, Any], model: Callable[[str], Path]
) -> None:
    texts, scores = answered(PROMPTS, answers[name, scheme]["steps"][0])
    found = Comparison.of(texts, scores, SCHEMES[scheme], 1, model(name))
    assert found.error > found.right.rounding


def test_ranks_that_share_a_group_of_a_state_refuse_weights_without_a_scale_a_column(
    checkpoint: Callable[[str, str], Path],
) -> None:
    with pytest.raises(AssertionError, match="ranks that share a group of a state with weights"):
        start_features((checkpoint("mamba2", "awq"), [SCORED_STEP], {"tensor_parallel_size": 2})).result()
