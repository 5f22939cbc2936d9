"""SGLang on two GPUs over NCCL, from graphs: dense products divided, and experts, each as the network computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_on_gpu import NEUTRAL, OURS, STEP, all_is_ours, answered, replayed, start

import quantized_checkpoints as checkpoints
from fl_dispatch.cli import small_model
from quantized_checkpoints import SCHEMES
from quantized_mixture import mixture
from quantized_network import Comparison
from running import MAX_TOKENS, PROMPTS, ran

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
RUNS: Mapping[str, Mapping[str, Any]] = {
    "compressed-tensors W8A8 int8": {"tp_size": 2},
    "awq": {"tp_size": 2, "ep_size": 2},
}
"""Scheme → arguments of the engine; the second one has the mixture's experts."""
TOGETHER = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
"""Engines that start at once find different memory on the two devices."""
each = pytest.mark.parametrize("name", RUNS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    whole = mixture(tmp_path_factory.mktemp("experts") / "whole")
    return lambda name: whole if "ep_size" in RUNS[name] else small_model.CHECKPOINT


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, model: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    folder, runs = tmp_path_factory.mktemp("divided"), {}
    for name, engine in RUNS.items():
        path = checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name], model=model(name))
        runs[name] = start(path, {**STEP, "scores": True}, engine=engine, variables=NEUTRAL | TOGETHER)
    return lambda name: runs[name].result()


@each
def test_it_computes_what_the_dequantized_network_does(
    name: str, answers: Callable[[str], dict[str, Any]], model: Callable[[str], Path]
) -> None:
    compared = Comparison.of(*answered(PROMPTS, answers(name)["steps"][0]), SCHEMES[name], 2, model(name))
    assert compared.error <= compared.right.rounding
    assert compared.quantization > compared.right.rounding, "rounding hides the quantization"
    assert compared.right.decides(PROMPTS, MAX_TOKENS)


@each
def test_both_ranks_chose_alike_and_replayed_their_graphs(name: str, answers: Callable[[str], dict[str, Any]]) -> None:
    found = answers(name)
    first, second = found["reports"]
    assert first["manifest"] == second["manifest"]
    for report in (first, second):
        assert all_is_ours(report)
        assert replayed(report, MAX_TOKENS - 1)
        assert all(ran({"report": report}, operator) == OURS for operator in SCHEMES[name].operators)
