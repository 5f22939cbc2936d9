"""Quantized experts in SGLang: what the dequantized network computes, within its own rounding, by our operators.

As :mod:`test_sglang_quantized`, with the model of :mod:`quantized_mixture`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from serving import STEP, answered, start

import quantized_checkpoints as checkpoints
from quantized_checkpoints import SCHEMES
from quantized_engines import Rules, Run, comparisons
from quantized_mixture import BOTH_KINDS, EXPERTS, LAYERS, experts_kernel, mixture, operator
from quantized_network import Comparison
from running import PROMPTS, ran
from sampling import drawn

pytestmark = pytest.mark.engine
PLUGINS = {
    "SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method,unwritten_memory",
    "SGLANG_FL_DENY_VENDORS": "wrong",
}
TWO = {"tp_size": 2}
ALONE = [Run(name) for name in drawn(EXPERTS, 1, "quantized experts, SGLang")]
RANKS = drawn(
    [
        Run(BOTH_KINDS[0], TWO, "each expert divided"),
        Run(BOTH_KINDS[1], TWO, "each expert divided"),
        Run(BOTH_KINDS[1], {**TWO, "ep_size": 2}, "the experts divided"),
    ],
    1,
    "experts, ranks, SGLang",
)
RUNS = [*ALONE, *RANKS]
each_run = pytest.mark.parametrize("run", RUNS, ids=str)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("experts") / "whole")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[Run], dict[str, Any]]:
    """An engine's right pass; and one with a wrong implementation of the experts."""
    folder = tmp_path_factory.mktemp("quantized")

    @cache
    def checkpoint(name: str) -> Path:
        return checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name], model=model)

    runs = {}
    for run in RUNS:
        order = {operator(run.made): ["impl:vendor.wrong"]}
        wrong = [{**STEP, "policy": {"prefer": "reference", "per_op_order": order}}] if run in ALONE else []
        asked = {**STEP, "scores": True}
        runs[run] = start(checkpoint(run.scheme), asked, *wrong, variables=PLUGINS, engine=run.engine)
    return lambda run: runs[run].result()


@pytest.fixture(scope="module")
def compared(answers: Callable[[Run], dict[str, Any]], model: Path) -> Callable[[Run], Comparison]:
    return comparisons(lambda run: answered(PROMPTS, answers(run)["steps"][0]), model)


@each_run
class TestNumbers(Rules):
    """They are right."""


@each_run
def test_its_experts_are_all_ours(run: Run, answers: Callable[[Run], dict[str, Any]]) -> None:
    for report in answers(run)["reports"]:
        assert report["layers"][experts_kernel(run.scheme)] == LAYERS
        assert report["native_layers"] == report["fallen_through"] == report["undispatched"] == report["failed"] == {}
        found = {"report": report}
        assert ran(found, operator(run.made)) - {"vendor.wrong"}
        assert not ran(found, "fused_moe")


@pytest.mark.parametrize("run", ALONE, ids=str)
def test_wrong_experts_change_what_it_computes(run: Run, answers: Callable[[Run], dict[str, Any]]) -> None:
    first, wrong = answers(run)["steps"]
    assert wrong["tokens"] != first["tokens"]
    assert answers(run)["report"]["counts"][f"{operator(run.made)} vendor.wrong"] > 0
