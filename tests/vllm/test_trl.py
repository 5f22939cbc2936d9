"""TRL's trainers with an engine of ours in their process: the reward rises, awake and with sleep mode.

Its client also gets completions from a server of ours. Trainers with a server need GPUs: ``gpu/test_trl_gpu.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engines import HOSTS, MAX_TOKENS, OTHER_HOSTS, PROMPTS, Runs, environment, ran, start_script
from p2p_serving import end, listing_nothing, served, wait_until_healthy

import variants
from processes import free_port
from sampling import drawn

TRL = HOSTS / "trl/site-packages"
STEPS = 6
CASES = {
    "GRPO": ("GRPO", False),
    "GRPO asleep": ("GRPO", True),
    "RLOO": ("RLOO", False),
    "Online DPO": ("Online DPO", False),
}
"""The trainer, and whether its engine sleeps while it learns."""
DRAWN = drawn(tuple(CASES), 1, "TRL")

pytestmark = [
    pytest.mark.skipif("TRL" not in OTHER_HOSTS, reason="another of the hosts that make hosts brings was drawn"),
    pytest.mark.skipif(not TRL.exists(), reason="TRL is not installed: make hosts"),
]


PATH = os.pathsep.join((str(TRL), environment()["PYTHONPATH"]))


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("trl")
    unsure = variants.unsure(checkpoint("qwen3"), folder / "unsure")

    def train(case: str) -> Future[dict[str, Any]]:
        trainer, sleep = CASES[case]
        job = {"model": str(unsure), "output": str(folder / case), "trainer": trainer, "steps": STEPS, "sleep": sleep}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # else all processes take one port
        return start_script("run_trl.py", job, cold=True, PYTHONPATH=PATH, **meet)

    return Runs({case: train(case) for case in DRAWN})


@pytest.mark.parametrize("case", DRAWN)
def test_the_reward_rises(case: str, results: Mapping[str, Any]) -> None:
    rewards = results[case]["rewards"]
    assert len(rewards) == STEPS
    assert rewards[-1] > rewards[0] + 0.2


@pytest.mark.parametrize("case", DRAWN)
def test_the_engine_has_the_trainers_weights_and_our_operators(case: str, results: Mapping[str, Any]) -> None:
    """In bfloat16 log-probabilities are near the trainer's in float32; of old weights they are far away.

    The others do not compare them; there the reward, which rises, shows the same.
    """
    assert len(results[case]["apart"]) == (STEPS if CASES[case][0] == "GRPO" else 0)
    assert max(results[case]["apart"], default=0.0) < 0.1
    assert ran(results[case], "paged_attention")
    assert results[case]["report"]["native_layers"] == {}


@pytest.mark.parametrize("case", DRAWN)
def test_an_engine_that_sleeps_has_given_its_weights_back(case: str, results: Mapping[str, Any]) -> None:
    assert (results[case]["weights"] == 0) == CASES[case][1]


def test_trls_client_gets_completions_from_a_server(
    checkpoint: Callable[[str], Path], tmp_path: Path, expected: Callable[[str], list[list[int]]]
) -> None:
    options = "--dtype float32 --enforce-eager --max-model-len 512 --kv-cache-memory-bytes 67108864"
    options += " --logprobs-mode processed_logprobs --max-logprobs -1 --enable-scale-out"
    transfer = ("--weight-transfer-config", json.dumps({"backend": "fl_gloo"}))
    variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": listing_nothing(tmp_path)}
    server = served(tmp_path / "log.txt", checkpoint("qwen3"), variables, *options.split(), *transfer)
    try:
        wait_until_healthy(server)
        job = {"server": server.url, "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
        got = start_script("run_trl_client.py", job, cold=True, PYTHONPATH=PATH).result()
    finally:
        end([server])
    assert got["greedy"] == expected("qwen3")
    assert got["prompts"] == PROMPTS
    assert [len(tokens) for tokens in got["sampled"]] == [MAX_TOKENS] * 3 * len(PROMPTS)
    assert all(len(given) == MAX_TOKENS and max(map(max, given)) <= 0 for given in got["logprobs"])
    assert (got["workers"], got["transfer"]["backend"]) == (1, "fl_gloo")
