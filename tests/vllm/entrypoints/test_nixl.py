"""vLLM's ``NixlConnector`` moves the KV cache between two engines' main memory, by NIXL's wheel without CUDA."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, OTHER_HOSTS, environment
from p2p_serving import HOST, TWO, Server, counts, end, gained, served, wait_until_healthy

from host_files import HOSTS
from processes import free_port

NIXL = HOSTS / "nixl"
PATH = os.pathsep.join((environment()["PYTHONPATH"], str(NIXL)))
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
OPTIONS = "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 4 --max-num-batched-tokens 64"
READ_FOR_ANOTHER = {"do_remote_decode": True, "do_remote_prefill": False}

pytestmark = [
    pytest.mark.skipif("NIXL" not in OTHER_HOSTS, reason="another of the hosts that make hosts brings was drawn"),
    pytest.mark.skipif(not NIXL.exists(), reason="NIXL is not installed: make hosts"),
]


@pytest.fixture(scope="module")
def servers(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two engines with the connector; the first reads prompts, the second goes on with them."""
    folder, model = tmp_path_factory.mktemp("nixl"), checkpoint("qwen3")
    connector = json.dumps({**CONNECTOR, "kv_load_failure_policy": "fail"})
    options = (*OPTIONS.split(), "--kv-cache-memory-bytes", "67108864", "--kv-transfer-config", connector)

    def start(name: str) -> Server:
        place = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        return served(folder / name, model, {**place, "PYTHONPATH": PATH, "UCX_TLS": "tcp,self,sm"}, *options)

    started = [start("reads.txt"), start("writes.txt")]
    try:
        wait_until_healthy(*started)
        yield started
    finally:
        end(started)


def ask(server: Server, prompt: list[int], tokens: int, transfer: dict[str, Any]) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**asked, "return_token_ids": True, "kv_transfer_params": transfer}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.loads(answer.read()))


def test_the_second_engine_writes_hugging_faces_tokens_and_computes_no_prompt(
    servers: list[Server], expected: Callable[[str], list[list[int]]]
) -> None:
    reads, writes = servers
    for prompt, tokens in zip(TWO, expected("qwen3")[1:3], strict=True):
        handed = ask(reads, prompt, 1, READ_FOR_ANOTHER)["kv_transfer_params"]
        before = counts(writes)
        assert ask(writes, prompt, MAX_TOKENS, handed)["choices"][0]["token_ids"] == tokens
        assert gained(writes, before) == {"external_kv_transfer": len(prompt)}


def test_a_cache_of_another_prompt_gives_other_tokens(
    servers: list[Server], expected: Callable[[str], list[list[int]]]
) -> None:
    reads, writes = servers
    first, second = TWO[0], [token + 1 for token in TWO[0]]
    handed = ask(reads, second, 1, READ_FOR_ANOTHER)["kv_transfer_params"]
    assert ask(writes, first, MAX_TOKENS, handed)["choices"][0]["token_ids"] != expected("qwen3")[1]
