"""Blocks of fp8 that fit no merged layer, in SGLang: what the dequantized network computes, within its own rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import STEP, answered, start

import quantized_blocks
import quantized_checkpoints as checkpoints
from quantized_blocks import DENSE, EXPERTS, LAYERS, Run
from quantized_engines import Rules, comparisons
from quantized_mixture import LAYERS as MIXED
from quantized_network import Comparison
from running import PROMPTS

pytestmark = pytest.mark.engine
RUNS = [*DENSE, Run("fp8", model=EXPERTS)]
each_run = pytest.mark.parametrize("run", RUNS, ids=str)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Run, Path]:
    folder = tmp_path_factory.mktemp("plain")
    return {run: quantized_blocks.build(run.model, folder / str(number)) for number, run in enumerate(RUNS)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, models: dict[Run, Path]) -> Callable[[Run], dict[str, Any]]:
    folder, runs = tmp_path_factory.mktemp("quantized"), {}
    for run, model in models.items():
        checkpoint = checkpoints.write_checkpoint(folder / model.name, run.made, model=model)
        runs[run] = start(checkpoint, {**STEP, "scores": True})
    return lambda run: runs[run].result()


@pytest.fixture(scope="module")
def compared(answers: Callable[[Run], dict[str, Any]], models: dict[Run, Path]) -> Callable[[Run], Comparison]:
    def found(run: Run) -> Comparison:
        return comparisons(lambda run: answered(PROMPTS, answers(run)["steps"][0]), models[run])(run)

    return found


@each_run
class TestNumbers(Rules):
    """They are right."""


@each_run
def test_its_products_in_blocks_are_all_ours(run: Run, answers: Callable[[Run], dict[str, Any]]) -> None:
    (report,) = answers(run)["reports"]
    found = {name: count for name, count in report["layers"].items() if "Block" in name}
    dense, mixed = {"Fp8BlockLayer": 4 * LAYERS}, {"Fp8BlockLayer": 2 * MIXED, "Fp8BlockExperts": MIXED}
    assert found == (mixed if run.model == EXPERTS else dense)
    assert not report["native_layers"]
