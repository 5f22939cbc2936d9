"""End-to-end check of a tuning: vLLM alone, with fixed policies and with a tuned file, alternately.

Each cell is an engine in a separate process, with random weights in the model's shape. All cells run at once and
alternate, workload by workload, so that a change of the machine's speed affects all alike; a waiting cell uses no time.
Two short rounds warm up. A cell that is then far behind keeps that one figure, and gets no further rounds.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import DispatchError
from ...settings import variable_names
from ..child import Child
from ..intervals import interval

VANILLA, TUNED, SHIPPED = "vanilla", "tuned", "shipped file"

ATTENTIONS = ("FLASH_ATTN", "TRITON_ATTN")
"""vLLM's own attention backends on an accelerator; on an H200 one is faster in decode, the other in prefill."""
FIXED = ("flagos", "vendor", "reference")
"""The preferences used as fixed policies."""
SLOW = 3.0
"""A cell gets no further rounds if the fastest cell is this many times as fast."""
WARM_UP = 8
"""Divisor of the number of generated tokens in a warm-up round."""
LEAST_LOSS = 0.01
"""Speed-ups of a fixed policy below this count as none."""


@dataclass(frozen=True)
class Workload:
    """``batch`` requests at once of ``prompt`` tokens, each generating ``new`` tokens."""

    name: str
    batch: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """Return the counted tokens: generated ones, or the prompts' if one token is generated."""
        return self.batch * (self.prompt if self.new == 1 else self.new)


def workloads(most_batch: int, accelerator: bool) -> tuple[Workload, ...]:
    """Return workloads: decode of one request and of many, and prompts."""
    new, prompt, prompts = (256, 2048, 32) if accelerator else (24, 256, 4)
    return (
        Workload("decode, batch 1", 1, 32, new),
        Workload(f"decode, batch {most_batch}", most_batch, 32, new),
        Workload(f"prefill, {prompts} x {prompt}", prompts, prompt, 1),
    )


@dataclass(frozen=True)
class Cell:
    """One engine: its environment variables, and further arguments of ``LLM``."""

    variables: Mapping[str, str]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_vanilla(self) -> bool:
        """Whether it runs without the plugin."""
        return self.variables.get("VLLM_PLUGINS") == ""


def cells(tuned: Mapping[str, str], untuned: Mapping[str, str], shipped: bool, accelerator: bool) -> dict[str, Cell]:
    """Return name → cell: vLLM alone, each fixed policy, this chip's shipped file if there is one, and the tuned file.

    Args:
        tuned, untuned: variables that give an engine the tuned file, and none of the user's files.
        shipped: whether the chip has a shipped file.
        accelerator: whether the device is an accelerator.
    """
    alone = {"VLLM_PLUGINS": ""}
    vanilla = {f"{VANILLA}, {name}": Cell(alone, {"attention_backend": name}) for name in ATTENTIONS}
    return {
        **(vanilla if accelerator else {VANILLA: Cell(alone)}),
        **{f"prefer={name}": Cell({"VLLM_FL_PREFER": name, **untuned}) for name in FIXED},
        **({SHIPPED: Cell(untuned)} if shipped else {}),
        TUNED: Cell(tuned),
    }


class Engine:
    """A cell's process.

    Args:
        name: the cell's name.
        cell: its differences from the other cells.
        module: the program; it takes the arguments of vLLM's ``LLM`` and answers with seconds.
        arguments: arguments of vLLM's ``LLM``, for all cells.
        logs: the folder of its log.
    """

    def __init__(self, name: str, cell: Cell, module: str, arguments: Mapping[str, Any], logs: Path) -> None:
        self.name, self.cell = name, cell
        plain = re.sub(r"\W+", "-", name)
        ours = set(variable_names())
        kept = {key: value for key, value in os.environ.items() if key not in ours and key != "VLLM_PLUGINS"}
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": str(logs / f"cache-{plain}")}
        self.child = Child(
            name,
            [sys.executable, "-m", module, json.dumps({**arguments, **cell.arguments})],
            {**kept, **offline, **cell.variables},
            logs / f"{plain}.log",
        )

    def run(self, work: Workload) -> float:
        """Return tokens per second of a workload."""
        return work.tokens / float(self.child.ask([work.batch, work.prompt, work.new]))


def measure(
    cells: Mapping[str, Cell],
    module: str,
    arguments: Mapping[str, Any],
    works: Sequence[Workload],
    rounds: int,
    logs: Path,
    say: Callable[[str], None],
) -> dict[str, dict[str, list[float]]]:
    """Return workload → cell → tokens per second of each round, or of the warm-up for a cell far behind.

    A cell that does not start is skipped, with a message.

    Args:
        cells: the engines.
        module: the program of an engine's process, see :class:`Engine`.
        arguments: arguments of vLLM's ``LLM``, for all engines.
        works, rounds: workloads, and rounds of each.
        logs: the folder of the engines' logs.
        say: shows a line.

    Raises:
        DispatchError: the tuned engine does not start, or one ends while it is measured.
    """
    engines = [Engine(name, cell, module, arguments, logs) for name, cell in cells.items()]
    try:
        for engine in list(engines):
            try:
                say(f"{engine.name}: ready after {engine.child.answer():.0f} s")
            except DispatchError as error:
                if engine.name == TUNED:
                    raise
                say(f"left out: {error}")
                engines.remove(engine)
        for work in works:
            _warm_up(engines, work)
        warm = {work.name: _warm_up(engines, work) for work in works}
        say("warm")
        behind = {work: _far_behind(engines, rates) for work, rates in warm.items()}
        rates = {work: {name: [warm[work][name]] for name in names} for work, names in behind.items()}
        for turn in range(rounds):
            for work in works:
                racing = [engine for engine in engines if engine.name not in behind[work.name]]
                for place in range(len(racing)):
                    engine = racing[(place + turn) % len(racing)]
                    rates[work.name].setdefault(engine.name, []).append(engine.run(work))
            say(f"round {turn + 1} of {rounds}")
        return {work: {one.name: of_cell[one.name] for one in engines} for work, of_cell in rates.items()}
    finally:
        for engine in engines:
            engine.child.stop()


def _warm_up(engines: Sequence[Engine], work: Workload) -> dict[str, float]:
    short = replace(work, new=max(1, work.new // WARM_UP))
    return {engine.name: engine.run(short) for engine in engines}


def _far_behind(engines: Sequence[Engine], rates: Mapping[str, float]) -> set[str]:
    """Return the fixed policies that are too slow for further rounds."""
    racing = {engine.name for engine in engines if engine.cell.is_vanilla or engine.name in (TUNED, SHIPPED)}
    return {name for name, rate in rates.items() if name not in racing and rate * SLOW < max(rates.values())}


def compared(rates: Mapping[str, Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    """Compare cells: one row per workload and cell, with tokens per second and the tuned engine's speed-up.

    The speed-up is computed round by round. A cell without rounds is compared with the tuned engine's median.
    """
    rows = []
    for work, of_cell in rates.items():
        ours = of_cell[TUNED]
        for name, values in of_cell.items():
            turns = len(values) == len(ours)
            gains = [
                mine / other for mine, other in zip(ours if turns else [statistics.median(ours)], values, strict=True)
            ]
            low, high = interval(gains)
            row = {"workload": work, "cell": name, "tokens_per_s": statistics.median(values), "turns": len(values)}
            rows.append({**row, "tuned": statistics.median(gains), "low": low, "high": high})
    return rows


def disagreements(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return in words the policies with which an engine is faster than with the tuned file; vanilla is not a policy."""
    return [
        f"{row['workload']}: {row['cell']} is {1 / row['tuned']:.3f} times as fast as the tuned file"
        for row in rows
        if not row["cell"].startswith(VANILLA) and row["cell"] != TUNED and row["high"] < 1 - LEAST_LOSS
    ]
