"""TRL's trainers with an engine of ours in their process: the reward rises, awake and with sleep mode."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engines import HOSTS, OTHER_HOSTS, Runs, environment, ran, start_script

import variants
from processes import free_port
from sampling import drawn

TRL = HOSTS / "trl/site-packages"
STEPS = 6
CASES = {
    "GRPO": ("GRPO", False),
    "GRPO asleep": ("GRPO", True),
    "Online DPO": ("Online DPO", False),
}
"""The trainer, and whether its engine sleeps while it learns."""
DRAWN = drawn(tuple(CASES), 1, "TRL")

pytestmark = [
    pytest.mark.skipif("TRL" not in OTHER_HOSTS, reason="another of the hosts that make hosts brings was drawn"),
    pytest.mark.skipif(not TRL.exists(), reason="TRL is not installed: make hosts"),
]


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    path, folder = os.pathsep.join((str(TRL), environment()["PYTHONPATH"])), tmp_path_factory.mktemp("trl")
    unsure = variants.unsure(checkpoint("qwen3"), folder / "unsure")

    def train(case: str) -> Future[dict[str, Any]]:
        trainer, sleep = CASES[case]
        job = {"model": str(unsure), "output": str(folder / case), "trainer": trainer, "steps": STEPS, "sleep": sleep}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # else all processes take one port
        return start_script("run_trl.py", job, cold=True, PYTHONPATH=path, **meet)

    return Runs({case: train(case) for case in DRAWN})


@pytest.mark.parametrize("case", DRAWN)
def test_the_reward_rises(case: str, results: Mapping[str, Any]) -> None:
    rewards = results[case]["rewards"]
    assert len(rewards) == STEPS
    assert rewards[-1] > rewards[0] + 0.2


@pytest.mark.parametrize("case", DRAWN)
def test_the_engine_has_the_trainers_weights_and_our_operators(case: str, results: Mapping[str, Any]) -> None:
    """In bfloat16 log-probabilities are near the trainer's in float32; of old weights they are far away.

    Online DPO does not compare them; there the reward, which rises, shows the same.
    """
    assert len(results[case]["apart"]) == (STEPS if CASES[case][0] == "GRPO" else 0)
    assert max(results[case]["apart"], default=0.0) < 0.1
    assert ran(results[case], "paged_attention")
    assert results[case]["report"]["native_layers"] == {}


@pytest.mark.parametrize("case", DRAWN)
def test_an_engine_that_sleeps_has_given_its_weights_back(case: str, results: Mapping[str, Any]) -> None:
    assert (results[case]["weights"] == 0) == CASES[case][1]
