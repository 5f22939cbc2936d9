"""Quantized checkpoints in SGLang: what the dequantized network computes, within its own rounding, by our operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from serving import STEP, answered, start

import quantized_checkpoints as checkpoints
import quantized_engines
from quantized_checkpoints import SCHEMES
from quantized_engines import Rules, comparisons
from quantized_network import Comparison
from running import PROMPTS
from sampling import drawn

pytestmark = pytest.mark.engine
PLUGINS = {
    "SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method",
    "SGLANG_FL_DENY_VENDORS": "wrong",
}
ASKED: Mapping[str, Any] = {**STEP, "scores": True}
PRODUCTS = 4 * 4
"""Those of a layer, merged as SGLang does, in all layers."""
LAYERS = {"gptq": "GptqLayer", "gptq, 8 bits": "GptqLayer", "awq": "AwqLayer"}


class Run(quantized_engines.Run):
    """As the host names its layer."""

    @property
    def layer(self) -> str:
        return LAYERS.get(self.scheme, self.made.layer)


ALONE = [Run(name) for name in drawn(list(SCHEMES), 2, "quantized checkpoints, SGLang")]
DIVIDED = ("compressed-tensors W8A8 int8", "compressed-tensors W4A16, zero points", "gptq", "awq", "fp8")
RUNS = [*ALONE, *(Run(name, {"tp_size": 2}, "two ranks") for name in drawn(DIVIDED, 1, "quantized, ranks, SGLang"))]
each_run = pytest.mark.parametrize("run", RUNS, ids=str)
each_operator = pytest.mark.parametrize(
    ("run", "operator"), [(run, operator) for run in ALONE for operator in run.made.operators], ids=str
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], dict[str, Any]]:
    """An engine's right pass, and one with a wrong implementation of each operator."""
    folder = tmp_path_factory.mktemp("quantized")

    @cache
    def checkpoint(name: str) -> Path:
        return checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name])

    runs = {}
    for run in RUNS:
        orders = [{name: ["impl:vendor.wrong"]} for name in run.made.operators if run in ALONE]
        wrong = [{**STEP, "policy": {"prefer": "reference", "per_op_order": order}} for order in orders]
        runs[run] = start(checkpoint(run.scheme), ASKED, *wrong, variables=PLUGINS, engine=run.engine)
    return lambda run: runs[run].result()


@pytest.fixture(scope="module")
def compared(answers: Callable[[Run], dict[str, Any]]) -> Callable[[Run], Comparison]:
    return comparisons(lambda run: answered(PROMPTS, answers(run)["steps"][0]))


@each_run
class TestNumbers(Rules):
    """They are right."""


@each_run
def test_its_products_are_all_ours(run: Run, answers: Callable[[Run], dict[str, Any]]) -> None:
    for report in answers(run)["reports"]:
        assert report["layers"][run.layer] == PRODUCTS
        assert not report["native_layers"]
        assert not report["undispatched"]
        assert {key.split(" ")[0] for key in report["counts"]} >= set(run.made.operators)


@each_operator
def test_a_wrong_implementation_changes_what_it_computes(
    run: Run, operator: str, answers: Callable[[Run], dict[str, Any]]
) -> None:
    first, *others = answers(run)["steps"]
    assert others[run.made.operators.index(operator)]["tokens"] != first["tokens"]
    assert answers(run)["report"]["counts"][f"{operator} vendor.wrong"] > 0
