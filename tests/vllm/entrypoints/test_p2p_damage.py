"""An engine is told that what it was sent was damaged, throws it away, and computes the prompt itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from damaged import POISON, variables
from engines import PROMPTS, RUNNERS
from p2p_serving import ask, end, serve, wait_until_healthy

from fl_transfer.p2p.protocol.route import Route

PROMPT = [*PROMPTS[2][:64], POISON, *PROMPTS[1]]


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
