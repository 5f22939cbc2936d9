"""An engine that takes over damaged keys and values finds NaN in its own logits, and computes the prompt itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from engines import PROMPTS, RUNNERS
from p2p_serving import ask, end, serve, wait_until_healthy
from safetensors import safe_open

from fl_transfer.p2p.protocol.route import Route

POISON = 450
"""A token of no other prompt."""
PROMPT = [*PROMPTS[2][:64], POISON, *PROMPTS[1]]


def test_blocks_that_were_sent_before_the_damage_was_seen_spoil_no_answer(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoint("qwen3")
    with safe_open(model / "model.safetensors", "pt") as tensors:
        torch.save(tensors.get_tensor("model.embed_tokens.weight")[POISON].float(), tmp_path / "poison.pt")
    policy = {"VLLM_FL_PLUGIN_MODULES": "poisoned_norm", "VLLM_FL_PER_OP": "rms_norm=vendor:poison|reference"}
    once = {**policy, "POISON": str(tmp_path / "poison.pt"), "POISON_TIMES": "1"}
    reads, reads_at = serve(tmp_path / "reads.txt", model, "kv_producer", {**RUNNERS["V2"], **once})
    writes, writes_at = serve(tmp_path / "writes.txt", model, "kv_consumer", RUNNERS["V2"])
    try:
        wait_until_healthy(reads, writes)
        right, route = ask(PROMPT, "alone", writes), Route.between(reads_at, writes_at)
        assert not writes.said("it is computed again")
        ask(PROMPT, "handed over", reads, route, max_tokens=1)
        assert ask(PROMPT, "handed over", writes, route) == right
        assert all(engine.said("it is computed again and watched") for engine in (reads, writes))
        assert not any(engine.said("is ended: its logits") for engine in (reads, writes))
    finally:
        end([reads, writes])
