"""Two GPUs: a trainer on one sends weights over NCCL to a server with captured graphs on the other, by HTTP routes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))

from engines import MAX_TOKENS, PROMPTS, expected_tokens, start_script
from p2p_serving import HOST, end, served, wait_until_healthy

import variants
from fl_dispatch.cli.checkpoints import build_checkpoint
from processes import free_port

pytestmark = pytest.mark.gpu
OPTIONS = "--max-model-len 512 --max-num-seqs 4 --kv-cache-memory-bytes 67108864 --gpu-memory-utilization 0.1"


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_a_trainers_weights_reach_the_server_over_nccl(mode: str, tmp_path: Path) -> None:
    model = build_checkpoint("qwen3", tmp_path / "qwen3")
    other = variants.other_weights(model, tmp_path / "other")
    transfer = ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    how = ["--enforce-eager"] if mode == "eager" else []
    variables = {"CUDA_VISIBLE_DEVICES": "0", "VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": HOST}
    server = served(tmp_path / "server.txt", model, variables, *OPTIONS.split(), "--dtype", "float32", *how, *transfer)
    try:
        wait_until_healthy(server)
        job = {
            "server": server.url,
            "ports": [free_port(), free_port()],
            "folders": [str(other), str(model)],
            "prompt": PROMPTS[1],
            "max_tokens": MAX_TOKENS,
        }
        script = str(Path(__file__).parent / "run_nccl_trainer.py")
        written = start_script(script, job, CUDA_VISIBLE_DEVICES="1", VLLM_HOST_IP=HOST).result()["tokens"]
    except AssertionError as error:
        raise AssertionError(f"{error}\nthe server:\n{server.log.read_text()[-6000:]}") from error
    finally:
        end([server])
    first, second = expected_tokens(other)[1], expected_tokens(model)[1]
    assert first != second
    assert written == [first, second] * 2
