"""TRL's client asks a server, as its trainers do: ``python run_trl_client.py job.json result.json``.

A job is ``{"server": URL, "prompts": token ids, "max_tokens": n}``. The result has the greedy tokens, and several
sampled ones with their log-probabilities.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
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
