"""Blocks of fp8 that fit no merged layer, in vLLM: what the dequantized network computes, within its own rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, SCORED_STEP, start_features

import quantized_blocks
import quantized_checkpoints as checkpoints
from quantized_blocks import DENSE, EXPERTS, LAYERS, Run
from quantized_engines import Rules, comparisons
from quantized_mixture import LAYERS as MIXED
from quantized_network import Comparison, answered

pytestmark = pytest.mark.engine
RUNS = [*DENSE, Run("fp8", model=EXPERTS)]
each_run = pytest.mark.parametrize("run", RUNS, ids=str)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Run, Path]:
    folder = tmp_path_factory.mktemp("plain")
    return {run: quantized_blocks.build(run.model, folder / str(number)) for number, run in enumerate(RUNS)}


@pytest.fixture(scope="module")
def memory() -> dict[str, Any]:
    """Arguments of an engine that say how much of a device's memory it takes."""
    return {}


@pytest.fixture(scope="module")
def answers(
    tmp_path_factory: pytest.TempPathFactory, models: dict[Run, Path], memory: dict[str, Any]
) -> dict[Run, Any]:
    folder = tmp_path_factory.mktemp("quantized")

    def checkpoint(run: Run) -> Path:
        return checkpoints.write_checkpoint(folder / models[run].name, run.made, model=models[run])

    found = start_features(*((checkpoint(run), [SCORED_STEP], {**run.engine, **memory}) for run in RUNS)).result()
    return dict(zip(RUNS, found["runs"], strict=True))


@pytest.fixture(scope="module")
def compared(answers: dict[Run, Any], models: dict[Run, Path]) -> Callable[[Run], Comparison]:
    def found(run: Run) -> Comparison:
        return comparisons(lambda run: answered(PROMPTS, answers[run]["steps"][0]), models[run])(run)

    return found


@each_run
class TestNumbers(Rules):
    """They are right."""


@each_run
def test_its_products_in_blocks_are_all_ours(run: Run, answers: dict[Run, Any]) -> None:
    layers = answers[run]["report"]["layers"]
    found = {name: count for name, count in layers.items() if "Block" in name}
    dense, mixed = {"Fp8BlockLayer": 4 * LAYERS}, {"Fp8BlockLayer": 2 * MIXED, "Fp8BlockExperts": MIXED}
    assert found == (mixed if run.model == EXPERTS else dense)
