"""An engine that reads prompts and one that answers give Hugging Face's tokens; Mooncake carries the pages by TCP.

Both are needed at the same time. Without Mooncake, which is no package of SGLang's own, nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import STEP, run

from processes import free_port
from running import PROMPTS

MODES = ("prefill", "decode")


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path]) -> dict[str, dict[str, Any]]:
    """Mode → two passes over the same prompts."""
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    meeting, here = free_port(), "127.0.0.1"
    rooms = {"bootstrap_host": [here] * len(PROMPTS), "bootstrap_port": [meeting] * len(PROMPTS)}
    numbers = [[100 * turn + number for number in range(len(PROMPTS))] for turn in range(2)]
    steps = tuple({**STEP, "more": {**rooms, "bootstrap_room": room}} for room in numbers)
    shared = {
        "disaggregation_transfer_backend": "mooncake_tcp",
        "disaggregation_bootstrap_port": meeting,
        "host": here,
        "page_size": 16,
    }
    with ThreadPoolExecutor(len(MODES)) as both:  # the pool of engines may start one at a time
        engines = {mode: {**shared, "disaggregation_mode": mode, "port": free_port()} for mode in MODES}
        started = {
            mode: both.submit(
                run, checkpoint("qwen3"), steps, engine=engine, variables={"SGLANG_FL_PREFER": "reference"}
            )
            for mode, engine in engines.items()
        }
        return {mode: found.result() for mode, found in started.items()}


def test_answers_are_hugging_faces(
    results: dict[str, dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    for step in results["decode"]["steps"]:
        assert step["tokens"] == expected("qwen3")
    for step in results["prefill"]["steps"]:
        assert [tokens[:1] for tokens in step["tokens"]] == [tokens[:1] for tokens in expected("qwen3")]


def test_the_second_engine_reads_no_prompt(results: dict[str, dict[str, Any]]) -> None:
    reading, answering = (results[mode]["report"]["counts"]["paged_attention reference.torch"] for mode in MODES)
    assert 0 < reading < answering
    assert "Prefill batch" not in results["decode"]["log"]


@pytest.mark.parametrize("cuda", [False, True])
def test_pages_are_handed_over_in_the_step_where_there_is_no_cuda(
    cuda: bool, host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from sglang_fl import disaggregation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    sender = SimpleNamespace(supports_host_tensor_indices=True)
    request: Any = SimpleNamespace(disagg_kv_sender=sender)
    disaggregation.send_kv_chunk(lambda *_: None, None, request, True)
    assert sender.supports_host_tensor_indices is cuda
