"""Quantized experts in engines: what the dequantized network computes, within its own rounding, by our operators.

As :mod:`test_quantized`, with the model of :mod:`quantized_mixture`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, SCORED_STEP, WRONG_IF_ASKED, ran, start_features

import quantized_checkpoints as checkpoints
from quantized_checkpoints import SCHEMES
from quantized_engines import Rules, Run, comparisons
from quantized_mixture import BOTH_KINDS, EXPERTS, LAYERS, experts_kernel, mixture, operator
from quantized_network import Comparison, answered
from sampling import drawn

pytestmark = pytest.mark.engine


TWO = {"tensor_parallel_size": 2}
EAGER = [Run(name, kind="eager") for name in drawn(EXPERTS, 2, "quantized experts")]
COMPILED = [Run(name, {"enforce_eager": False}, "compiled") for name in drawn(BOTH_KINDS, 1, "experts, compiled")]
RANKS = drawn(
    [
        Run(BOTH_KINDS[0], TWO, "each expert divided"),
        Run(BOTH_KINDS[1], TWO, "each expert divided"),
        Run(BOTH_KINDS[1], {**TWO, "enable_expert_parallel": True}, "the experts divided"),
    ],
    1,
    "experts, ranks",
)
RUNS = [*EAGER, *COMPILED, *RANKS]
each_run = pytest.mark.parametrize("run", RUNS, ids=str)


def steps(run: Run) -> list[Mapping[str, Any]]:
    """A right pass; and where choices are not frozen, one with a wrong implementation of the experts."""
    wrong = {"do": "policy", "prefer": "reference", "per_op_order": {operator(run.made): ["impl:vendor.wrong"]}}
    return [SCORED_STEP, *(({"do": "reset_prefix_cache"}, wrong, SCORED_STEP) if run in EAGER else ())]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("experts") / "whole")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[Run, Any]:
    folder = tmp_path_factory.mktemp("quantized")

    @cache
    def checkpoint(name: str) -> Path:
        return checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name], model=model)

    found = start_features(
        *((checkpoint(run.scheme), steps(run), run.engine) for run in RUNS), **WRONG_IF_ASKED
    ).result()
    return dict(zip(RUNS, found["runs"], strict=True))


@pytest.fixture(scope="module")
def compared(answers: dict[Run, Any], model: Path) -> Callable[[Run], Comparison]:
    return comparisons(lambda run: answered(PROMPTS, answers[run]["steps"][0]), model)


@each_run
class TestNumbers(Rules):
    """They are right."""


@each_run
def test_its_experts_are_all_ours(run: Run, answers: dict[Run, Any]) -> None:
    report = answers[run]["report"]
    assert report["layers"][experts_kernel(run.scheme)] == LAYERS
    assert not report["native_layers"]
    assert ran(answers[run], operator(run.made)) - {"vendor.wrong"}
    assert not ran(answers[run], "fused_moe")


@pytest.mark.parametrize("run", EAGER, ids=str)
def test_wrong_experts_change_what_it_computes(run: Run, answers: dict[Run, Any]) -> None:
    first, wrong = (step for step in answers[run]["steps"] if isinstance(step, list))
    assert [one["tokens"] for one in wrong] != [one["tokens"] for one in first]
