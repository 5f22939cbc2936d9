"""Quantized checkpoints in engines: what the dequantized network computes, within its own rounding, by our operators.

Engines of a kind start one after the other in one process: eager ones of the drawn schemes, one compiled as users have
it by default, and one of two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, SCORED_STEP, WRONG_IF_ASKED, ran, start_features
from torch import Tensor

import quantized_checkpoints as checkpoints
from fl_dispatch.cli import small_model
from quantized_checkpoints import SCHEMES
from quantized_engines import Rules, Run, comparisons, divisible
from quantized_network import Comparison, answered
from sampling import drawn

pytestmark = pytest.mark.engine
PRODUCTS = 4 * 4
"""Those of a layer, merged as vLLM does, in all layers of either model."""

EAGER = [Run(name, kind="eager") for name in drawn(list(SCHEMES), 3, "quantized checkpoints")]
COMPILED = [Run(name, {"enforce_eager": False}, "compiled") for name in drawn(list(SCHEMES), 1, "quantized, compiled")]
RANKS = [Run(name, {"tensor_parallel_size": 2}, "two ranks") for name in drawn(list(SCHEMES), 1, "quantized, ranks")]
RUNS = [*EAGER, *COMPILED, *RANKS]
each_run = pytest.mark.parametrize("run", RUNS, ids=str)
each_operator = pytest.mark.parametrize(
    ("run", "operator"), [(run, operator) for run in EAGER for operator in run.made.operators], ids=str
)


def steps(run: Run) -> list[Mapping[str, Any]]:
    """A right pass; and where choices are not frozen, one for each operator with a wrong implementation of it."""
    made = [SCORED_STEP]
    for operator in run.made.operators if run in EAGER else ():
        wrong = {"do": "policy", "prefer": "reference", "per_op_order": {operator: ["impl:vendor.wrong"]}}
        made += [{"do": "reset_prefix_cache"}, wrong, SCORED_STEP]
    return made


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return divisible(tmp_path_factory.mktemp("divisible") / "whole")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, divided: Path) -> dict[Run, Any]:
    folder = tmp_path_factory.mktemp("quantized")

    @cache
    def checkpoint(name: str, model: Path) -> Path:
        place = folder / model.name / name.replace(" ", "-")
        return checkpoints.write_checkpoint(place, SCHEMES[name], model=model)

    def start(runs: Sequence[Run], model: Path = small_model.CHECKPOINT) -> Future[dict[str, Any]]:
        return start_features(
            *((checkpoint(run.scheme, model), steps(run), run.engine) for run in runs), **WRONG_IF_ASKED
        )

    kinds = [start(EAGER), start(COMPILED), start(RANKS, divided)]
    return dict(zip(RUNS, (found for kind in kinds for found in kind.result()["runs"]), strict=True))


@pytest.fixture(scope="module")
def compared(answers: dict[Run, Any], divided: Path) -> Callable[[Run], Comparison]:
    def found(run: Run) -> tuple[list[list[int]], Tensor]:
        return answered(PROMPTS, answers[run]["steps"][0])

    alone, together = comparisons(found), comparisons(found, divided)
    return lambda run: (together if run in RANKS else alone)(run)


@each_run
class TestNumbers(Rules):
    """They are right."""


@each_run
def test_its_products_are_all_ours(run: Run, answers: dict[Run, Any]) -> None:
    report = answers[run]["report"]
    assert report["layers"][run.made.layer] == PRODUCTS
    assert not report["native_layers"]
    assert all(ran(answers[run], operator) - {"vendor.wrong"} for operator in run.made.operators)


@each_operator
def test_a_wrong_implementation_changes_what_it_computes(run: Run, operator: str, answers: dict[Run, Any]) -> None:
    first, *others = (step for step in answers[run]["steps"] if isinstance(step, list))
    wrong = others[run.made.operators.index(operator)]
    assert [one["tokens"] for one in wrong] != [one["tokens"] for one in first]
