"""TRL trains on one GPU with a server of ours on the other, which gets each step's weights over NCCL."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytest.importorskip("vllm")
if None in map(importlib.util.find_spec, ("trl", "datasets", "accelerate")):
    pytest.skip("needs TRL, datasets and accelerate", allow_module_level=True)

from engines import start_script
from p2p_serving import HOST, Server, end, listing_nothing, served, wait_until_healthy

import variants
from fl_dispatch.cli.checkpoints import build_checkpoint
from processes import free_port

pytestmark = pytest.mark.gpu
STEPS = 12
SMALL = "--dtype float32 --enforce-eager --max-model-len 64 --max-num-seqs 16 --kv-cache-memory-bytes 67108864"
FOR_TRL = "--gpu-memory-utilization 0.1 --logprobs-mode processed_logprobs --max-logprobs -1 --enable-scale-out"
TRANSFER = ("--weight-transfer-config", json.dumps({"backend": "nccl"}))
"""``trl vllm-serve`` gives these and those for TRL."""


TRAINERS = ("GRPO", "RLOO")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    return variants.unsure(build_checkpoint("qwen3", folder / "qwen3"), folder / "unsure")


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One on the first GPU for each trainer."""
    folder = tmp_path_factory.mktemp("servers")
    variables = {"CUDA_VISIBLE_DEVICES": "0", "VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": HOST}
    variables["PYTHONPATH"] = listing_nothing(folder)
    options = (*SMALL.split(), *FOR_TRL.split(), *TRANSFER)
    started = {name: served(folder / f"{name}.txt", model, variables, *options) for name in TRAINERS}
    try:
        wait_until_healthy(*started.values())
        yield started
    finally:
        end(list(started.values()))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_reward_rises_and_the_server_has_the_trainers_weights(
    trainer: str, model: Path, servers: dict[str, Server], tmp_path: Path
) -> None:
    server = servers[trainer]
    at = {"vllm_server_base_url": server.url, "vllm_group_port": free_port()}
    output = str(tmp_path / "output")
    job = {"model": str(model), "output": output, "trainer": trainer, "steps": STEPS, "sleep": False, "server": at}
    job["rate"] = 2e-2
    try:
        result = start_script("run_trl.py", job, CUDA_VISIBLE_DEVICES="1", VLLM_HOST_IP=HOST).result()
    except AssertionError as error:
        raise AssertionError(f"{error}\nthe server:\n{server.log.read_text()[-6000:]}") from error
    rewards = result["rewards"]
    assert len(rewards) == STEPS
    assert max(rewards[-3:]) > rewards[0] + 0.2, "the server writes with the trainer's weights"
    assert len(result["apart"]) == STEPS
    assert max(result["apart"]) < 0.1, "of old weights they would be far away"
