"""SGLang's HTTP server tells the client of a request with NaN why it ended, streamed or not, and serves the others."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from sglang_server import Server

from over_http import ASK
from poison import ORIGIN, POISON, SAID, variables
from running import PROMPTS

pytestmark = pytest.mark.engine

POISONED = [*PROMPTS[2][:48], POISON, *PROMPTS[1]]


def test_a_request_with_nan_gets_an_error_that_says_why_and_the_others_their_answers(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    model, right = checkpoint("qwen3"), expected("qwen3")
    server = Server(model, tmp_path / "log.txt", XDG_STATE_HOME=str(tmp_path), **variables(model, tmp_path))
    client = server.client.with_options(max_retries=0)

    def tokens(prompt: list[int]) -> list[int]:
        found: list[int] = client.completions.create(prompt=prompt, **ASK).choices[0].token_ids  # type: ignore[attr-defined]
        return found

    def refused(stream: bool) -> openai.APIError:
        with pytest.raises(openai.APIError) as raised:
            answer = client.completions.create(prompt=POISONED, stream=stream, **ASK)
            for _ in answer if stream else ():
                pass
        return raised.value

    try:
        for stream in (False, True):
            with ThreadPoolExecutor(4) as clients:
                others = [clients.submit(tokens, PROMPTS[row]) for row in (0, 1)]
                error = clients.submit(refused, stream).result()
                assert [other.result() for other in others] == right[:2]
            assert SAID in error.message
            assert stream or isinstance(error, openai.InternalServerError)
        assert tokens(PROMPTS[2]) == right[2]
        deadline = time.monotonic() + 20
        while "fl_damage_total{" not in server.metrics():
            assert time.monotonic() < deadline
            time.sleep(0.5)
        (counted,) = re.findall(r"^fl_damage_total{(.*)} (\S+)$", server.metrics(), re.MULTILINE)
        assert ORIGIN.items() <= dict(re.findall(r'(\w+)="(.*?)"', counted[0])).items()
    finally:
        server.kill()
