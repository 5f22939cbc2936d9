"""A running ``vllm serve``, which a test asks as clients and scrapers do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines import MAX_TOKENS, environment, serve_command

import processes

READY_WITHIN = 240.0
SEEN_WITHIN = 20.0
OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "67108864"),
    *("--max-num-seqs", "3", "--max-num-batched-tokens", "384", "--served-model-name", "tiny", "--host", "127.0.0.1"),
)


class Server:
    """A running server, whose worker descends from process ``pid``."""

    def __init__(
        self, model: Path, log: Path, state: str, variables: Mapping[str, str], options: Sequence[str] = ()
    ) -> None:
        self.port = processes.free_port()
        self.log, self.state = log, state
        arguments = (*serve_command(str(model)), *OPTIONS, *options, "--port", str(self.port))
        given = environment(XDG_STATE_HOME=state, VLLM_ENABLE_V1_MULTIPROCESSING="1", **variables)
        with log.open("wb") as output:
            self.process = processes.begin(arguments, given, output.fileno(), output.fileno())
        self.pid = self.process.pid
        deadline = time.monotonic() + READY_WITHIN
        while time.monotonic() < deadline and _is_alive(self.pid):
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.end()
        raise AssertionError(f"the server did not start:\n{log.read_text()[-4000:]}")

    def get(self, path: str, body: Any = None) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers={"Content-Type": "application/json"}
        )
        if body is not None:
            request.data = json.dumps(body).encode()
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def tokens(self, prompt: Sequence[int]) -> list[int]:
        ask = {"model": "tiny", "prompt": list(prompt), "max_tokens": MAX_TOKENS, "temperature": 0.0}
        answer = json.loads(self.get("/v1/completions", {**ask, "ignore_eos": True, "return_token_ids": True}))
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    def metric(self, name: str, labels: dict[str, str]) -> float | None:
        """A metric's value, as Prometheus would scrape it."""
        text = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        found = re.search(rf"^{re.escape(f'{name}{{{text}}}')} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return float(found[1]) if found else None

    def until(self, name: str, labels: dict[str, str], least: float) -> float:
        deadline = time.monotonic() + SEEN_WITHIN
        while (value := self.metric(name, labels) or 0.0) < least and time.monotonic() < deadline:
            time.sleep(0.2)
        return value

    def fl(self, *arguments: str) -> processes.Finished:
        command = "from fl_dispatch.cli import main; main()"
        return processes.python("-c", command, *arguments, environment=environment(XDG_STATE_HOME=self.state))

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGINT)
        self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # if a process of it is left


def _is_alive(pid: int) -> bool:
    """Whether a process has not ended; its parent may not have waited for it yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
