"""One engine on two nodes, here two addresses of one machine, gives Hugging Face's tokens by the host's executor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, environment, serve_command, wait_until_served

from processes import free_port

ADDRESSES = ("127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="module")
def nodes(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The two nodes' processes and logs, and where the first one answers."""
    folder, port, master = tmp_path_factory.mktemp("nodes"), free_port(), free_port()
    assert port != master
    command = [sys.executable, *serve_command(str(checkpoint("qwen3"))), "--served-model-name", "tiny"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--kv-cache-memory-bytes", "67108864", "--tensor-parallel-size", "2"]
    command += ["--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", str(master)]
    own = (["--host", ADDRESSES[0], "--port", str(port)], ["--headless"])
    logs, started = [folder / f"{rank}.txt" for rank in range(2)], []
    for rank, address in enumerate(ADDRESSES):
        variables = environment(
            VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROC_METHOD="fork", VLLM_HOST_IP=address
        )
        with logs[rank].open("w") as output:
            arguments = [*command, "--node-rank", str(rank), *own[rank]]
            process = subprocess.Popen(
                arguments, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        started.append(process)
    try:
        url = f"http://{ADDRESSES[0]}:{port}"
        wait_until_served(url, started, logs)
        yield {"url": url, "processes": started, "logs": logs}
    finally:
        for process in started:
            process.terminate()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):  # what it has left, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_the_tokens_are_those_of_hugging_face(
    nodes: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    asked = {"model": "tiny", "prompt": PROMPTS, "max_tokens": MAX_TOKENS, "temperature": 0.0}
    body = json.dumps({**asked, "ignore_eos": True, "return_token_ids": True}).encode()
    request = urllib.request.Request(f"{nodes['url']}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.loads(answer.read())
    assert [choice["token_ids"] for choice in found["choices"]] == expected("qwen3")


def test_each_node_has_a_worker_of_ours_which_meets_the_other_at_the_first_ones_address(nodes: dict[str, Any]) -> None:
    for log in nodes["logs"]:
        text = log.read_text()
        assert "layers through fl_dispatch" in text
        assert f"tcp://{ADDRESSES[0]}:" in text


def test_the_first_node_has_the_address_that_its_variable_names(nodes: dict[str, Any]) -> None:
    assert f"mq_connect_ip={ADDRESSES[0]}" in nodes["logs"][0].read_text()
