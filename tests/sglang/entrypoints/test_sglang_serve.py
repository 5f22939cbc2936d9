"""``python -m sglang.launch_server`` answers the OpenAI client with Hugging Face's tokens, streaming too."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import psutil
import pytest
from serving import environment
from sglang_server import Server

from fl_dispatch.hosting.records.runs import Sizes, recorded
from over_http import ASK, OverHTTP
from running import PROMPTS


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(checkpoint("qwen3"), tmp_path_factory.mktemp("serve") / "log.txt", SGLANG_FL_WIBBLE="1")
    yield running
    running.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client


@pytest.fixture(scope="module")
def log(server: Server) -> Path:
    return server.log


class TestServer(OverHTTP):
    WARNED = ("SGLANG_FL_WIBBLE",)


def test_a_completion_has_the_structure_that_was_asked_for(server: Server) -> None:
    ask = {**ASK, "prompt": "hello world", "max_tokens": 4}
    free = server.client.completions.create(**{**ask, "extra_body": {}}).choices[0].text
    bound = server.client.completions.create(**{**ask, "extra_body": {"regex": "(water|salt)"}}).choices[0].text
    assert free.strip() not in ("water", "salt")
    assert bound.strip() in ("water", "salt")


def test_the_server_ran_our_operators_and_said_so(server: Server) -> None:
    log = server.log.read_text()
    assert "layers through fl_dispatch" in log
    for operator in ("rms_norm", "silu_and_mul", "rotary_embedding"):
        assert f"Op '{operator}' using 'reference.torch'" in log
    for operator in ("kv_cache_write", "paged_attention"):
        assert f"Op '{operator}' using 'vendor.cpu.cpp'" in log
    assert "never dispatched" not in log


def test_metrics_and_commands_say_what_the_scheduler_process_runs(server: Server) -> None:
    server.client.completions.create(prompt=PROMPTS[0], **ASK)
    text = server.metrics()
    assert 'fl_selected_implementation{implementation="reference.torch",operator="rms_norm",rank="0"} 1.0' in text
    assert "sglang:prompt_tokens_total{" in text
    found = subprocess.run(
        [Path(sys.executable).with_name("fl"), "explain", "rms_norm", "--json", "--run", str(server.process.pid)],
        env=environment(),
        capture_output=True,
        check=True,
    )
    (entry,) = json.loads(found.stdout)
    assert entry["decision"]["considered"][0]["impl_id"] == "reference.torch"
    (norms,) = entry["layers"]
    assert (norms["layer"], norms["count"], norms["host"]) == ("RMSNorm", 13, "forward_native")
    assert (norms["runs"], norms["kept"]) == ("reference.torch", "")
    assert entry["pid"] in [child.pid for child in psutil.Process(server.process.pid).children(True)]
    (run,) = (run for run in recorded() if run.pid == entry["pid"])
    sizes = Sizes(**run.sizes)
    assert (sizes.dtype, sizes.tensor_parallel, sizes.eager) == ("float32", 1, True)
    assert min(sizes.requests, sizes.step_tokens) > 0


def test_on_sigterm_the_server_and_its_processes_end(server: Server) -> None:
    processes = [server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children(True))]
    assert len(processes) >= 3
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(90)
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert code == 0, server.log.read_text()[-3000:]
