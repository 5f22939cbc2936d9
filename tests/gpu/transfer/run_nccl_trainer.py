"""A trainer on a GPU sends checkpoints to a server over NCCL: ``python run_nccl_trainer.py job.json result.json``.

A job is ``{"server": URL, "ports": one for each meeting, "folders": checkpoints, "prompt": ids, "max_tokens": n}``.
The result's ``tokens`` has the server's tokens after each transfer: all folders packed, then all folders one parameter
at a time.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any


def ask(url: str, body: dict[str, Any] | None) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def tokens(job: dict[str, Any]) -> list[int]:
    asked = {"model": "tiny", "prompt": job["prompt"], "max_tokens": job["max_tokens"], "temperature": 0}
    body = {**asked, "ignore_eos": True, "return_token_ids": True}
    return list(ask(f"{job['server']}/v1/completions", body)["choices"][0]["token_ids"])


def main(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    torch.cuda.set_device(0)
    client = HTTPVLLMWeightSyncClient(job["server"])
    networks = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda() for path in job["folders"]]
    written = []
    for packed, port in zip((True, False), job["ports"], strict=True):
        meet = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
        info = NCCLTrainerInitInfo(rank=0, **meet, packed=packed)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(networks[0]))
        for network in networks:
            trainer.source = ModuleSource(network)
            trainer.send_weights()
            ask(f"{job['server']}/reset_prefix_cache", None)
            written.append(tokens(job))
        trainer.shutdown()
    return {"tokens": written}


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))
