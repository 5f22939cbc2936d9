"""Two GPUs: a trainer on one sends weights over NCCL to a server with captured graphs on the other, by HTTP routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytest.importorskip("vllm")

from engines import MAX_TOKENS, PROMPTS, expected_tokens, start_script
from p2p_serving import HOST, Server, end, served, wait_until_healthy

import variants
from fl_dispatch.cli.checkpoints import build_checkpoint
from processes import free_port

pytestmark = pytest.mark.gpu
OPTIONS = "--max-model-len 512 --max-num-seqs 4 --kv-cache-memory-bytes 67108864 --gpu-memory-utilization 0.1"
MODES = {"eager": ["--enforce-eager"], "graphs": []}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("checkpoints") / "qwen3")


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One on the first GPU for each mode."""
    folder = tmp_path_factory.mktemp("servers")
    variables = {"CUDA_VISIBLE_DEVICES": "0", "VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": HOST}
    same = (*OPTIONS.split(), "--dtype", "float32", "--weight-transfer-config", json.dumps({"backend": "nccl"}))
    started = {mode: served(folder / f"{mode}.txt", model, variables, *same, *how) for mode, how in MODES.items()}
    try:
        wait_until_healthy(*started.values())
        yield started
    finally:
        end(list(started.values()))


@pytest.mark.parametrize("mode", MODES)
def test_a_trainers_weights_reach_the_server_over_nccl(
    mode: str, model: Path, servers: dict[str, Server], tmp_path: Path
) -> None:
    server, other = servers[mode], variants.other_weights(model, tmp_path / "other")
    folders, ports = [str(other), str(model)], [free_port(), free_port()]
    told = {"server": server.url, "ports": ports, "folders": folders, "prompt": PROMPTS[1], "max_tokens": MAX_TOKENS}
    script = str(Path(__file__).parent / "run_nccl_trainer.py")
    try:
        written = start_script(script, told, CUDA_VISIBLE_DEVICES="1", VLLM_HOST_IP=HOST).result()["tokens"]
    except AssertionError as error:
        raise AssertionError(f"{error}\nthe server:\n{server.log.read_text()[-6000:]}") from error
    first, second = expected_tokens(other)[1], expected_tokens(model)[1]
    assert first != second
    assert written == [first, second] * 2
