"""TRL's client asks a server, as its trainers do: ``python run_trl_client.py job.json result.json``.

A job is ``{"server": URL, "prompts": token ids, "max_tokens": n}``. The result has the greedy tokens, and several
sampled ones with their log-probabilities. Without prompts it is the client of TRL's asynchronous trainers that asks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def asynchronous(server: str) -> dict[str, Any]:
    """The answers that these trainers get from a server, and whether it is paused when they say so."""
    import requests
    from accelerate import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState()  # the client logs with it
    client = VLLMClient(server)
    client.wait_for_server_ready()
    about = {"length": client.get_max_model_len(), "dtype": client.get_dtype(), "workers": client.get_world_size()}
    paused = []
    for turn in (client.pause, client.resume):
        turn()
        paused.append(requests.get(f"{server}/is_paused", timeout=30).json()["is_paused"])
    return {**about, "paused": paused}


def main(job: dict[str, Any]) -> dict[str, Any]:
    if "prompts" not in job:
        return asynchronous(job["server"])
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient(base_url=job["server"])
    same = {"prompts": job["prompts"], "max_tokens": job["max_tokens"], "generation_kwargs": {"ignore_eos": True}}
    greedy = client.generate(**same, temperature=0.0, logprobs=None)
    sampled = client.generate(**same, n=3, temperature=1.0, logprobs=0)
    client.reset_prefix_cache()
    return {
        "transfer": client.get_server_info()["weight_transfer_config"],
        "workers": client.get_world_size(),
        "greedy": greedy["completion_ids"],
        "sampled": sampled["completion_ids"],
        "logprobs": sampled["logprobs"],
        "prompts": sampled["prompt_ids"],
    }


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))
