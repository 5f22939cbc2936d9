"""``/metrics`` of a running server counts the drafts that a model makes and those that are accepted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sglang_server import Server

import drafters
from over_http import ASK
from running import MAX_TOKENS, PROMPTS, reference_network

WIDTH = 3
"""Number of tokens in a draft."""
SEEN_WITHIN = 20.0


def test_metrics_count_the_drafts_that_hugging_face_predicts(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    """The shares of accepted tokens are those of a log line's steps; a line comes when the first request ends."""
    target, drafter = drafters.under_sglang(checkpoint, tmp_path)["draft_model"]
    network, judge = (reference_network(model, torch.float32) for model in (target, drafter))

    def right(text: list[int], answer: list[int]) -> int:
        return drafters.drafted(judge, text[1:], answer)  # SGLang shows a drafter no first token

    accepted = [drafters.accepted(network, right, prompt, MAX_TOKENS, WIDTH) for prompt in PROMPTS]
    options = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(drafter))
    server = Server(target, tmp_path / "log.txt", *options, "--decode-log-interval", str(len(accepted[0])))

    def metric(name: str, value: float) -> None:
        """Wait for a value: the scheduler writes it beside the answer."""
        deadline, found = time.monotonic() + SEEN_WITHIN, []
        while found != [pytest.approx(value)] and time.monotonic() < deadline:
            found = [float(one) for one in re.findall(rf"^sglang:{name}{{.*}} (\S+)$", server.metrics(), re.MULTILINE)]
        assert found == [pytest.approx(value)], name

    try:
        for row, prompt in enumerate(PROMPTS):
            assert server.client.completions.create(prompt=prompt, **ASK).choices[0].token_ids == expected("qwen3")[row]
            checked = [len(one) for one in accepted[: row + 1]]
            metric("generation_tokens_total", MAX_TOKENS * len(checked))
            metric("spec_verify_calls_total", sum(checked))
            if row == 0:
                metric("spec_accept_length", 1 + sum(accepted[0]) / len(accepted[0]))
                metric("spec_accept_rate", sum(accepted[0]) / (WIDTH * len(accepted[0])))
        assert 0 < sum(map(sum, accepted)) < WIDTH * sum(map(len, accepted))
    finally:
        server.kill()
