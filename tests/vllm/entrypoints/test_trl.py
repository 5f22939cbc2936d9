"""TRL's trainers with an engine of ours in their process learn, from a reward or from a teacher.

Its client also gets completions from a server of ours. Trainers with a server need GPUs: ``test_trl_gpu.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, OTHER_HOSTS, PROMPTS, Runs, environment, ran, start_script
from p2p_serving import Server, end, listing_nothing, served, wait_until_healthy

import variants
from host_files import HOSTS
from processes import free_port
from sampling import drawn

TRL = HOSTS / "trl/site-packages"


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        trainer: a name in ``run_trl``.
        sleep: whether its engine sleeps while it learns.
        steps, rate: of learning.
        gains: the least growth of the reward, or of the probability that the teacher gives to completions.
    """

    trainer: str
    sleep: bool = False
    steps: int = 6
    rate: float = 2e-2
    gains: float = 0.2


TAUGHT: dict[str, Any] = {"steps": 12, "rate": 4e-3, "gains": 0.1}
CASES = {
    "GRPO": Case("GRPO"),
    "GRPO asleep": Case("GRPO", sleep=True),
    "GMPO": Case("GMPO"),
    "RLOO": Case("RLOO"),
    "Online DPO": Case("Online DPO"),
    "SDPO": Case("SDPO", steps=12, rate=1e-2),
    "SDFT": Case("SDFT", steps=12, rate=2e-3),
    "Distillation": Case("Distillation", **TAUGHT),
    "Server Distillation": Case("Server Distillation", **TAUGHT),
    "GOLD": Case("GOLD", **TAUGHT),
    "IW-OPD": Case("IW-OPD", steps=16, rate=4e-3, gains=0.1),
}
REWARDED = ("GRPO", "GMPO", "RLOO", "Online DPO", "SDPO")
"""Trainers with a reward; the others have a teacher."""
DRAWN = drawn(tuple(CASES), 1, "TRL")

pytestmark = [
    pytest.mark.skipif("TRL" not in OTHER_HOSTS, reason="another of the hosts that make hosts brings was drawn"),
    pytest.mark.skipif(not TRL.exists(), reason="TRL is not installed: make hosts"),
]


PATH = os.pathsep.join((str(TRL), environment()["PYTHONPATH"]))


@pytest.fixture(scope="module")
def teacher(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variants.unsure(checkpoint("qwen3"), tmp_path_factory.mktemp("teacher") / "teacher", 0.1)


@pytest.fixture(scope="module")
def server(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The teacher's."""
    folder = tmp_path_factory.mktemp("server")
    options = "--dtype float32 --enforce-eager --max-model-len 512 --kv-cache-memory-bytes 67108864"
    options += " --logprobs-mode processed_logprobs --max-logprobs -1 --enable-scale-out"
    transfer = ("--weight-transfer-config", json.dumps({"backend": "fl_gloo"}))
    variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": listing_nothing(folder)}
    started = served(folder / "log.txt", teacher, variables, *options.split(), *transfer)
    try:
        wait_until_healthy(started)
        yield started
    finally:
        end([started])


@pytest.fixture(scope="module")
def results(
    checkpoint: Callable[[str], Path], teacher: Path, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("trl")
    unsure = variants.unsure(checkpoint("qwen3"), folder / "unsure")

    def train(name: str) -> Future[dict[str, Any]]:
        case = CASES[name]
        model = teacher if case.trainer == "SDFT" else unsure  # it is its own teacher
        job = {"model": str(model), "output": str(folder / name), **dataclasses.asdict(case)}
        if case.trainer not in REWARDED:
            job |= {"teacher": str(teacher), "teacher_server": server.url}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # else all processes take one port
        return start_script("run_trl.py", job, cold=True, PYTHONPATH=PATH, **meet)

    return Runs({name: train(name) for name in DRAWN})


@pytest.mark.parametrize("case", DRAWN)
def test_the_reward_rises_or_the_teacher_likes_the_completions_better(case: str, results: Mapping[str, Any]) -> None:
    rewards = results[case]["rewards"]
    assert len(rewards) == CASES[case].steps
    assert rewards[-1] > rewards[0] + CASES[case].gains


@pytest.mark.parametrize("case", DRAWN)
def test_the_engine_has_the_trainers_weights_and_our_operators(case: str, results: Mapping[str, Any]) -> None:
    """In bfloat16 log-probabilities are near the trainer's in float32; of old weights they are far away.

    Online DPO calls its engine itself, so these are not compared; there the reward, which rises, shows the same.
    """
    assert len(results[case]["apart"]) == (0 if CASES[case].trainer == "Online DPO" else CASES[case].steps)
    assert max(results[case]["apart"], default=0.0) < 0.05
    assert ran(results[case], "paged_attention")
    assert results[case]["report"]["native_layers"] == {}


@pytest.mark.parametrize("case", DRAWN)
def test_an_engine_that_sleeps_has_given_its_weights_back(case: str, results: Mapping[str, Any]) -> None:
    assert (results[case]["weights"] == 0) == CASES[case].sleep


def test_trls_client_gets_completions_from_a_server(server: Server, expected: Callable[[str], list[list[int]]]) -> None:
    """The greatest of the teacher's logits, which are a tenth as far apart, is that of the checkpoint."""
    job = {"server": server.url, "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
    got = start_script("run_trl_client.py", job, cold=True, PYTHONPATH=PATH).result()
    assert got["greedy"] == expected("qwen3")
    assert got["prompts"] == PROMPTS
    assert [len(tokens) for tokens in got["sampled"]] == [MAX_TOKENS] * 3 * len(PROMPTS)
    assert all(len(given) == MAX_TOKENS and max(map(max, given)) <= 0 for given in got["logprobs"])
    assert (got["workers"], got["transfer"]["backend"]) == (1, "fl_gloo")


def test_the_client_of_asynchronous_trainers_is_answered(server: Server) -> None:
    """These trainers themselves need CUDA, for they ask for the GPU's name; their server does not."""
    got = start_script("run_trl_client.py", {"server": server.url}, cold=True, PYTHONPATH=PATH).result()
    assert (got["length"], got["dtype"], got["workers"]) == (512, "torch.float32", 1)
    assert got["paused"] == [True, False]
