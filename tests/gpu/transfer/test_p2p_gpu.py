"""Two GPUs: an engine on one reads prompts, one on the other writes answers, and NCCL carries keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytest.importorskip("vllm")

from engines import expected_tokens
from p2p_serving import TWO, ask, counts, end, gained, hand_over, serve, wait_for, wait_until_healthy

from fl_dispatch.cli.checkpoints import build_checkpoint
from fl_transfer.p2p.protocol.route import Route

pytestmark = pytest.mark.gpu
NEUTRAL = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
MEMORY = "--gpu-memory-utilization 0.1"
READERS: Mapping[str, Mapping[str, Any]] = {
    "PUT_ASYNC": {"transport": "nccl"},
    "PUT": {"send_type": "PUT"},
    "GET": {"send_type": "GET"},
    "host": {"transport": "host"},
}
"""Engines on the first GPU: name → options; a transport that is not named is ``auto``, as on the second one."""
AUTO = {"transport": "auto"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("checkpoints") / "qwen3")


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("p2p")

    def on(gpu: int) -> dict[str, str]:
        return {**NEUTRAL, "CUDA_VISIBLE_DEVICES": str(gpu)}

    started = {
        name: serve(folder / f"{name}.txt", model, "kv_producer", on(0), MEMORY, **{**AUTO, **options})
        for name, options in READERS.items()
    }
    started["writes"] = serve(folder / "writes.txt", model, "kv_consumer", on(1), MEMORY, **AUTO)
    servers = [server for server, _ in started.values()]
    try:
        wait_until_healthy(*servers)
        yield started
    finally:
        end(servers)


@pytest.mark.parametrize("reader", ["PUT_ASYNC", "PUT", "GET"])
def test_nccl_carries_keys_and_values_once_two_engines_have_met(
    reader: str, engines: dict[str, Any], model: Path
) -> None:
    expected = expected_tokens(model)[1:3]
    (reads, _), (writes, _) = engines[reader], engines["writes"]
    written, _ = hand_over(engines, reader)
    assert written == expected
    wait_for(lambda: reads.said("from device to device, by nccl"), [reads, writes], within=45)
    sent = counts(reads)
    for salt in ("by nccl", "again"):
        written, gained_ = hand_over(engines, reader, f"{reader} {salt}")
        assert written == expected
        assert gained_["received_direct_bytes"] == gained_["received_bytes"] > 0
        assert gained_["local_compute"] == len(TWO), "the last token of each prompt"
        assert "lost_transfers" not in gained_
    assert counts(reads)["sent_direct_bytes"] > sent.get("sent_direct_bytes", 0)


def test_an_engine_that_is_to_use_main_memory_does(engines: dict[str, Any], model: Path) -> None:
    for salt in ("host", "again"):
        written, gained_ = hand_over(engines, "host", f"host {salt}")
        assert written == expected_tokens(model)[1:3]
        assert gained_["received_bytes"] > 0
        assert "received_direct_bytes" not in gained_
    assert engines["host"][0].said("keys and values travel through main memory, because the option transport says so")


def test_after_a_reading_engine_is_killed_its_prompts_are_computed(engines: dict[str, Any], model: Path) -> None:
    """Last, because the engine is gone afterwards."""
    (reads, reads_at), (writes, writes_at) = engines["PUT_ASYNC"], engines["writes"]
    reads.kill()
    before = counts(writes)
    written = [ask(prompt, "killed", writes, Route.between(reads_at, writes_at)) for prompt in TWO]
    assert written == expected_tokens(model)[1:3]
    assert gained(writes, before)["local_compute"] == sum(len(prompt) for prompt in TWO)
    written, gained_ = hand_over(engines, "GET", "another reader")
    assert written == expected_tokens(model)[1:3]
    assert gained_["received_direct_bytes"] > 0
