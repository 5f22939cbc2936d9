"""A running ``sglang.launch_server``, which a test asks as clients and scrapers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
from serving import environment, server_arguments

from over_http import KEY
from processes import free_port

READY_WITHIN = 400.0


class Server:
    """A running server.

    Args:
        process: its first process.
        address: of its own protocol, beside OpenAI's.
        log: the file that it writes.
        client: of OpenAI, which has the key.
    """

    def __init__(self, model: Path, log: Path, *options: str, **variables: str) -> None:
        port = free_port()
        named = ["--served-model-name", "tiny", "--port", str(port), "--api-key", KEY, "--enable-metrics", *options]
        self.log, self.address = log, f"http://127.0.0.1:{port}"
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *server_arguments(model), *named],
                env=environment(**variables),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)
        self._wait(f"http://127.0.0.1:{port}/health")

    def _wait(self, url: str) -> None:
        deadline = time.monotonic() + READY_WITHIN
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self.kill()
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """End every process of it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def metrics(self) -> str:
        """Return what Prometheus would scrape."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
