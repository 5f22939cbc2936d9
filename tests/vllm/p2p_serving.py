"""HTTP servers of engines with the P2P connector, for tests on CPUs and on GPUs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import MAX_TOKENS, PROMPTS, environment, serve_command

import processes
from fl_transfer.p2p.protocol.route import Address, Route
from processes import Fork, free_port, warm

HOST = "127.0.0.1"
BLOCK = 16
BLOCKS = 36
"""Blocks of each engine."""
READY_WITHIN = 240.0
TWO = PROMPTS[1:3]


@dataclass
class Server:
    """A process that listens."""

    process: Fork | subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def said(self, what: str) -> bool:
        return what in self.log.read_text()


def start(log: Path, port: int, variables: Mapping[str, str], *arguments: str) -> Server:
    with log.open("wb") as output:
        if processes.always_cold:
            command, given = [sys.executable, *arguments], environment(**variables)
            cold = subprocess.Popen(command, env=given, stdout=output, stderr=output, start_new_session=True)
            return Server(cold, port, log)
        return Server(Fork(warm(), arguments, environment(**variables), output.fileno(), output.fileno()), port, log)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def wait_for(happens: Callable[[], bool], servers: list[Server], within: float = READY_WITHIN) -> None:
    deadline = time.monotonic() + within
    while True:
        with suppress(OSError):
            if happens():
                return
        logs = "\n".join(f"{server.log.name}:\n{server.log.read_text()[-3000:]}" for server in servers)
        started = [server.process for server in servers if isinstance(server.process, subprocess.Popen)]
        assert [process.poll() for process in started] == [None] * len(started), logs
        assert time.monotonic() < deadline, logs
        time.sleep(0.1)


def ask(
    prompt: list[int], salt: str, server: Server, route: Route | None = None, within: float = 60.0, **more: Any
) -> list[int]:
    """The tokens that a server writes to a prompt."""
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**asked, "return_token_ids": True, "cache_salt": salt, **more}).encode()
    headers = {"Content-Type": "application/json", **({} if route is None else {"X-Request-Id": str(route)})}
    request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=within) as answer:
        lines = [line[6:] for line in answer if line.startswith(b"data: {")] if more.get("stream") else [answer.read()]
    return [token for line in lines for token in json.loads(line)["choices"][0]["token_ids"]]


def counts(server: Server) -> dict[str, float]:
    """An engine's counts of blocks and of prompts' tokens, by their source."""
    found = {}
    for line in get(f"{server.url}/metrics").splitlines():
        if match := re.match(r"vllm:(?:fl_p2p_(\w+)_total|prompt_tokens_by_source_total){(.*)} (\S+)", line):
            source = re.search(r'source="(\w+)"', match[2])
            found[match[1] or (source[1] if source else "")] = float(match[3])
    return found


def gained(server: Server, before: Mapping[str, float]) -> dict[str, float]:
    """The growth of an engine's counts since."""
    wait_for(lambda: sum(counts(server).values()) > sum(before.values()), [])
    return {name: value - before.get(name, 0) for name, value in counts(server).items() if value != before.get(name, 0)}


def transfer(role: str, port: int, name: str = "P2pConnector", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": role, "kv_port": str(port), "kv_connector_extra_config": extra}


def served(log: Path, model: Path, variables: Mapping[str, str], *options: str, port: int = 0) -> Server:
    """Start an HTTP server of a model, which is called tiny."""
    port = port or free_port()
    method = "spawn" if processes.always_cold else "fork"
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": method}
    place = ("--served-model-name", "tiny", "--host", HOST, "--port", str(port))
    return start(log, port, {**fixed, **variables}, *serve_command(str(model)), *options, *place)


def listing_nothing(folder: Path) -> str:
    """Python's path with a pip that lists nothing: vLLM's ``/server_info``, which TRL asks, is an error without pip."""
    (folder / "pip").mkdir()
    for file in ("__init__.py", "__main__.py"):
        (folder / "pip" / file).touch()
    return os.pathsep.join((str(folder), environment()["PYTHONPATH"]))


def wait_until_healthy(*servers: Server) -> None:
    """Return once all of them answer."""
    wait_for(lambda: [get(f"{server.url}/health") for server in servers] == [""] * len(servers), list(servers))


def serve(
    log: Path,
    model: Path,
    role: str,
    variables: Mapping[str, str],
    options: str = "",
    heartbeats: int = 0,
    **extra: Any,
) -> tuple[Server, Address]:
    """Start an HTTP server with the connector; with a port for heartbeats it tells the proxy of itself."""
    port, listens = free_port(), free_port()
    at = {"proxy_ip": HOST, "proxy_port": str(heartbeats), "http_port": str(port)} if heartbeats else {}
    connector = json.dumps(transfer(role, listens, "P2pNcclConnector", **at, **extra))
    fixed = "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 4 --max-num-batched-tokens 64"
    fixed += f" --num-gpu-blocks-override {BLOCKS} --block-size {BLOCK} --kv-cache-memory-bytes 67108864"
    given = (*fixed.split(), *options.split(), "--kv-transfer-config", connector)
    return served(log, model, {"VLLM_HOST_IP": HOST, **variables}, *given, port=port), Address(HOST, listens)


def end(servers: list[Server]) -> None:
    for server in servers:
        server.kill()
        server.process.wait()


def hand_over(engines: dict[str, Any], reader: str, salt: str = "") -> tuple[list[list[int]], dict[str, float]]:
    """The tokens of the engine that writes for prompts that another one has read, and the growth of its counts."""
    (reads, reads_at), (writes, writes_at) = engines[reader], engines["writes"]
    before, written, salt = counts(writes), [], salt or reader
    for prompt in TWO:
        route = Route.between(reads_at, writes_at)
        ask(prompt, salt, reads, route, max_tokens=1)
        written.append(ask(prompt, salt, writes, route))
    return written, gained(writes, before)
