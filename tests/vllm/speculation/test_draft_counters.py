"""``/metrics`` of a running ``vllm serve`` counts the drafts that a model makes and those that are accepted."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from engines import MAX_TOKENS, PROMPTS
from served import Server

import drafters
from running import reference_network

WIDTH = 3
"""Number of tokens in a draft."""


def test_metrics_count_the_drafts_that_hugging_face_predicts(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    target, drafter = drafters.pairs(checkpoint, tmp_path)["draft_model"]
    network, judge = (reference_network(model, torch.float32) for model in (target, drafter))
    who = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": WIDTH}
    options = ("--speculative-config", json.dumps(who))
    server = Server(target, tmp_path / "log.txt", tempfile.mkdtemp(prefix="fl-state-"), {}, options)
    labels = {"engine": "0", "model_name": "tiny"}

    def counted() -> list[float | None]:
        drafts = [
            server.metric(f"vllm:spec_decode_{name}_total", labels)
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        ]
        places = [
            server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", {**labels, "position": str(place)})
            for place in range(WIDTH)
        ]
        return [server.metric("vllm:generation_tokens_total", labels), *drafts, *places]

    try:
        found = [0] * (4 + WIDTH)
        assert counted() == found
        for prompt, answer in zip(PROMPTS, expected("qwen3"), strict=True):
            assert server.tokens(prompt) == answer
            accepted = drafters.accepted(network, partial(drafters.drafted, judge), prompt, MAX_TOKENS, WIDTH)
            places = [sum(place < one for one in accepted) for place in range(WIDTH)]
            more = [MAX_TOKENS, len(accepted), WIDTH * len(accepted), sum(accepted), *places]
            found = [one + other for one, other in zip(found, more, strict=True)]
            assert counted() == found
        assert 0 < found[3] < found[2]
    finally:
        server.end()
