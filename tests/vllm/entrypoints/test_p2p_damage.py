"""An engine is told that what it was sent was damaged, throws it away, and computes the prompt itself."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import PROMPTS, RUNNERS
from p2p_serving import Server, ask, end, serve, wait_for, wait_until_healthy

from fl_dispatch.hosting.damage.verdicts import StepReport, Verdicts, of_wrong
from fl_transfer.p2p.protocol.route import Route
from poison import POISON, variables
from vllm_fl.damage.scheduler import Damage

PROMPT = [*PROMPTS[2][:64], POISON, *PROMPTS[1]]
BANS = {
    "VLLM_FL_PLUGIN_MODULES": "long_wrong",
    "VLLM_FL_PER_OP": "silu_and_mul=vendor:long|reference",
    "VLLM_FL_SHADOW_SHARE": "1",
    "VLLM_FL_SHADOW_BUDGET": "1",
    "VLLM_FL_SHADOW_ACTION": "ban",
}
"""An engine whose activation is wrong for more than 64 tokens, which shadow mode finds."""


@dataclass(frozen=True)
class RequestOf:
    request_id: str


def test_blocks_that_were_sent_before_the_damage_was_seen_are_taken_back_before_they_are_used(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoint("qwen3")
    once = variables(model, tmp_path, POISON_TIMES="1")
    reads, reads_at = serve(tmp_path / "reads.txt", model, "kv_producer", {**RUNNERS["V2"], **once})
    writes, writes_at = serve(tmp_path / "writes.txt", model, "kv_consumer", RUNNERS["V2"])
    try:
        wait_until_healthy(reads, writes)
        right, route = ask(PROMPT, "alone", writes), Route.between(reads_at, writes_at)
        assert not writes.said("it is computed again")
        ask(PROMPT, "handed over", reads, route, max_tokens=1)
        assert ask(PROMPT, "handed over", writes, route) == right
        assert reads.said("it is computed again and watched")
        assert writes.said("its KV cache does not come, because the engine that sent it found NaN or infinity in")
        assert not writes.said("it is computed again and watched")
        assert not any(engine.said("is ended: its logits") for engine in (reads, writes))
    finally:
        end([reads, writes])


def events(server: Server, prompt: list[int], salt: str, route: Route, begun: Callable[[], None]) -> list[Any]:
    """The events of a long streamed answer; ``begun`` is called after the first one."""
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps({**asked, "return_token_ids": True, "cache_salt": salt}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": str(route)}
    request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
    found = []
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                found.append(json.loads(line[6:]))
                if len(found) == 1:
                    begun()
    return found


@pytest.mark.parametrize("action", ["end", "recompute"])
def test_after_a_ban_the_other_engine_discards_what_it_loaded_and_what_it_has_not_loaded_yet(
    action: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """An answer is being written when the fault is found, because shadow mode compares nothing before."""
    model, long, from_now = checkpoint("qwen3"), PROMPTS[2][:300], tmp_path / "now"
    given = {**BANS, "COMPARED_FROM": str(from_now)}
    reads, reads_at = serve(tmp_path / "reads.txt", model, "kv_producer", given, "--max-num-batched-tokens 128")
    slow = {name: BANS[name] for name in ("VLLM_FL_PLUGIN_MODULES", "VLLM_FL_PER_OP")}  # right for its 64 tokens
    chosen = {"VLLM_FL_DAMAGED_REQUESTS": action, **slow, "PAUSE": "0.015"}  # so that it still writes when told
    writes, writes_at = serve(tmp_path / "writes.txt", model, "kv_consumer", chosen)
    why = of_wrong(["'silu_and_mul' by 'vendor.long'"])
    try:
        wait_until_healthy(reads, writes)
        right = ask(long, "alone", writes)
        running, waiting = (Route.between(reads_at, writes_at) for _ in range(2))
        ask(long, "running", reads, running, max_tokens=1)

        def find() -> None:
            from_now.touch()
            ask(long, "waiting", reads, waiting, max_tokens=1)

        with ThreadPoolExecutor(1) as other:
            found = events(writes, long, "running", running, lambda: other.submit(find) and None)
        wait_for(lambda: writes.said("another engine, which takes them back: cmpl-"), [reads, writes])
        wrong = [token for event in found if "choices" in event for token in event["choices"][0]["token_ids"]]
        assert wrong[: len(right)] != right, "the answer began with keys and values that were wrong"
        assert (why in str(found[-1])) == (action == "end")
        assert (len(wrong) == 100) == (action == "recompute")
        assert ask(long, "waiting", writes, waiting) == right
        assert ask(long, "running", writes) == right, "its blocks are not in the prefix cache"
        assert reads.said(f"requests with keys and values of an implementation that was wrong: cmpl-{waiting}")
    finally:
        end([reads, writes])


class Engine:
    """A scheduler with two running requests, their blocks, and a connector."""

    def __init__(self, action: str) -> None:
        self.evicted, self.changed, self.told = set[int](), list[str](), list[tuple[Any, str]]()
        blocks = {"shares": ([4, 2],), "alone": ([5], [6])}
        pool = SimpleNamespace(blocks=range(9))
        manager = SimpleNamespace(get_block_ids=blocks.__getitem__, evict_blocks=self.evicted.update, block_pool=pool)
        scheduler: Any = SimpleNamespace(
            running=[RequestOf(name) for name in blocks],
            connector=SimpleNamespace(fl_take_back=lambda *said: self.told.append(said)),
            kv_cache_manager=manager,
            prev_step_scheduled_req_ids=set(),
            _preempt_request=lambda request, *_, **__: self.changed.append(request.request_id),
            finish_requests=lambda name, _: self.changed.append(name),
        )
        self.damage = Damage(scheduler)
        self.damage.verdicts = Verdicts(action)

    def judge(self, report: StepReport, spoiled: dict[int, str]) -> list[tuple[str, str]]:
        """Return the requests that end after a step without requests, and why."""
        step: Any = SimpleNamespace(num_scheduled_tokens={})
        output: Any = SimpleNamespace(num_nans_in_logits=None)
        return [(one.request_id, why) for one, why in self.damage.judge(step, output, False, report, spoiled)]


@pytest.mark.parametrize("action", ["recompute", "end"])
def test_requests_with_blocks_that_were_taken_back_begin_again_or_end_whoever_loaded_them(action: str) -> None:
    engine = Engine(action)
    ended = engine.judge(StepReport(), {1: "it is wrong", 2: "it is wrong"})
    assert engine.changed == ["shares"]
    assert engine.evicted == set(range(9)), "a request that has ended may have shared them, too"
    assert engine.told == []
    assert ended == ([("shares", "it is wrong")] if action == "end" else [])


@pytest.mark.parametrize("action", ["recompute", "end"])
def test_after_a_ban_receivers_are_told_of_everything_and_running_requests_begin_again_or_end(
    action: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, wrong = Engine(action), ("'linear' by 'vendor.x'",)
    ended = engine.judge(StepReport(wrong=wrong), {})
    assert sorted(engine.changed) == ["alone", "shares"]
    assert engine.evicted == set(range(9))
    assert engine.told == [(None, of_wrong(wrong))]
    assert ended == ([(name, of_wrong(wrong)) for name in ("shares", "alone")] if action == "end" else [])
    assert "keys and values of an implementation that was wrong: shares, alone" in caplog.text


def test_without_a_ban_requests_are_named_and_go_on(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine("end")
    assert engine.judge(StepReport(kept=("'linear' by 'vendor.x'",)), {}) == []
    assert [*engine.changed, *engine.evicted, *engine.told] == []
    assert "of 'linear' by 'vendor.x', which differed and stays in service: shares, alone;" in caplog.text
