"""A running ``vllm serve`` finds its wrong operator, says so in log, metrics and commands, and goes on without it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, environment, serve_command

import processes
from fl_dispatch.hosting.records.runs import Sizes, recorded

READY_WITHIN = 240.0
SEEN_WITHIN = 20.0
LONG = max(range(len(PROMPTS)), key=lambda row: len(PROMPTS[row]))
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_FL_PLUGIN_MODULES": "long_wrong",
    "VLLM_FL_PER_OP": "silu_and_mul=vendor:long|reference",
    "VLLM_FL_SHADOW_SHARE": "1",
    "VLLM_FL_SHADOW_BUDGET": "1",
    "VLLM_FL_SHADOW_ACTION": "ban",
}
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "67108864")
SIZES = ("--max-num-seqs", "3", "--max-num-batched-tokens", "384")
# Cached prefixes were computed by whoever ran then; here each request shall be computed anew.
FRESH = ("--no-enable-prefix-caching", "--served-model-name", "tiny", "--host", "127.0.0.1")
WRONG = {"operator": "silu_and_mul", "implementation": "vendor.long", "rank": "0"}
RIGHT = {**WRONG, "implementation": "reference.torch"}


class Server:
    """A running server, whose worker descends from process ``pid``."""

    def __init__(self, model: Path, log: Path, state: str) -> None:
        self.port = processes.free_port()
        self.log, self.state = log, state
        arguments = (*serve_command(str(model)), *OPTIONS, *SIZES, *FRESH, "--port", str(self.port))
        variables = environment(XDG_STATE_HOME=state, **VARIABLES)
        with log.open("wb") as output:
            self.process = processes.Fork(processes.warm(), arguments, variables, output.fileno(), output.fileno())
        self.pid = self.process.pid
        deadline = time.monotonic() + READY_WITHIN
        while time.monotonic() < deadline:
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

    def tokens(self, row: int) -> list[int]:
        ask = {"model": "tiny", "prompt": PROMPTS[row], "max_tokens": MAX_TOKENS, "temperature": 0.0}
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
        os.kill(self.pid, signal.SIGINT)
        self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # if a process of it is left


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(
        checkpoint("qwen3"), tmp_path_factory.mktemp("shadow") / "log.txt", tempfile.mkdtemp(prefix="fl-state-")
    )
    yield running
    running.end()


def test_a_fault_in_a_running_server_is_found_told_once_counted_and_taken_out(
    server: Server, expected: Callable[[str], list[list[int]]]
) -> None:
    right = expected("qwen3")
    assert server.tokens(0) == right[0]
    assert server.until("fl_shadow_calls_total", WRONG, 1.0) >= 1
    assert server.metric("fl_shadow_differences_total", WRONG) == 0
    assert server.metric("fl_selected_implementation", WRONG) == 1
    assert server.metric("fl_selected_implementation", RIGHT) is None
    assert server.metric("vllm:num_requests_running", {"engine": "0", "model_name": "tiny"}) == 0

    assert server.tokens(LONG) != right[LONG]  # the answer that the server would have given without shadow mode
    assert server.until("fl_bans", WRONG, 3.0) == 3
    assert server.metric("fl_shadow_differences_total", WRONG) == 3
    assert server.metric("fl_selected_implementation", RIGHT) == 1
    assert server.metric("fl_selected_implementation", WRONG) is None

    assert server.tokens(LONG) == right[LONG]
    assert server.tokens(0) == right[0]
    told = re.findall(r"shadow: 'silu_and_mul' by 'vendor.long' .* in (\S+)\); it is banned", server.log.read_text())
    assert len(told) == len(set(told)) == 3, told
    assert server.log.read_text().count("shadow: ") == 3


def test_explain_and_doctor_speak_of_the_serving_process(server: Server) -> None:
    explained = server.fl("explain", "silu_and_mul", "--run", str(server.pid), "--json")
    (entry,) = json.loads(explained.log)
    assert entry["rank"] == 0
    assert entry["pid"] != server.pid
    chosen = [each for each in entry["decision"]["considered"] if each["status"] == "chosen"]
    assert [each["impl_id"] for each in chosen] == ["reference.torch"]
    ended = server.fl("doctor", "--run", str(server.pid), "--json")
    report = json.loads(ended.log)
    assert ended.returncode == 1
    assert "it is banned" in report["problems"][0]
    assert ["shadow_action", "ban", "environment variable VLLM_FL_SHADOW_ACTION", "0"] in report["settings"]
    assert report["workers"][0][1] == f"{entry['pid']} (running)"
    assert report["workers"][0][4].startswith("V2, because vLLM prefers it")


def test_the_record_has_the_sizes_of_its_steps_for_fl_tune(server: Server) -> None:
    (run,) = recorded(Path(server.state) / "fl_dispatch" / "runs")
    sizes = Sizes(**run.sizes)
    assert (sizes.dtype, sizes.tensor_parallel, sizes.eager, sizes.compiled) == ("float32", 1, True, False)
    assert (sizes.requests, sizes.step_tokens) == (3, 384)


def test_a_number_that_is_no_run_is_one_error(server: Server) -> None:
    ended = server.fl("explain", "silu_and_mul", "--run", "4194304")
    assert ended.returncode == 2
    assert "no worker of that process left a record" in ended.last_line
