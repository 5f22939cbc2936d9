"""TRL trains on one GPU with a server of ours on the other, which gets each step's weights over NCCL."""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytest.importorskip("vllm")
if None in map(importlib.util.find_spec, ("trl", "datasets", "accelerate")):
    pytest.skip("needs TRL, datasets and accelerate", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))

from engines import start_script
from p2p_serving import HOST, end, listing_nothing, served, wait_until_healthy

import variants
from fl_dispatch.cli.checkpoints import build_checkpoint
from processes import free_port

pytestmark = pytest.mark.gpu
STEPS = 12
SMALL = "--dtype float32 --max-model-len 64 --max-num-seqs 16 --kv-cache-memory-bytes 67108864"
FOR_TRL = "--gpu-memory-utilization 0.1 --logprobs-mode processed_logprobs --max-logprobs -1 --enable-scale-out"
TRANSFER = ("--weight-transfer-config", json.dumps({"backend": "nccl"}))
"""``trl vllm-serve`` gives these and those for TRL."""


@pytest.mark.parametrize("trainer", ["GRPO", "RLOO"])
def test_the_reward_rises_and_the_server_has_the_trainers_weights(trainer: str, tmp_path: Path) -> None:
    model = variants.unsure(build_checkpoint("qwen3", tmp_path / "qwen3"), tmp_path / "unsure")
    variables = {"CUDA_VISIBLE_DEVICES": "0", "VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": HOST}
    variables["PYTHONPATH"] = listing_nothing(tmp_path)
    server = served(tmp_path / "server.txt", model, variables, *SMALL.split(), *FOR_TRL.split(), *TRANSFER)
    try:
        wait_until_healthy(server)
        job = {
            "model": str(model),
            "output": str(tmp_path / "output"),
            "trainer": trainer,
            "steps": STEPS,
            "sleep": False,
            "server": {"vllm_server_base_url": server.url, "vllm_group_port": free_port()},
        }
        result = start_script("run_trl.py", job, CUDA_VISIBLE_DEVICES="1", VLLM_HOST_IP=HOST).result()
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
    except AssertionError as error:
        raise AssertionError(f"{error}\nthe server:\n{server.log.read_text()[-6000:]}") from error
    finally:
        end([server])
    rewards = result["rewards"]
    assert len(rewards) == STEPS
    assert max(rewards[-3:]) > rewards[0] + 0.2
    assert "vllm:generation_tokens_total" in metrics, "the server wrote the completions"
    if trainer == "GRPO":  # RLOO does not compare them
        assert len(result["apart"]) == STEPS
        assert max(result["apart"]) < 0.1, "old weights would be far away"
