"""Does an engine say what the kernels said? vLLM alone, with fixed policies and with a tuned file, in turns.

Each cell is an engine in a process of its own, with random weights in the model's shape. All of them live at once and
take turns, workload by workload, so that a change of the machine's speed hits all alike; one that waits uses no time.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DispatchError
from ...settings import variable_names
from ..intervals import interval

VANILLA, TUNED = "vanilla", "tuned"
FIXED: Mapping[str, Mapping[str, str]] = {
    "prefer=flagos": {"VLLM_FL_PREFER": "flagos"},
    "prefer=vendor": {"VLLM_FL_PREFER": "vendor"},
    "prefer=reference": {"VLLM_FL_PREFER": "reference"},
}
LEAST_LOSS = 0.01
"""A fixed policy that is faster by less is as fast."""
VOCABULARY = 1000
"""Prompts have tokens below this."""


@dataclass(frozen=True)
class Workload:
    """``batch`` requests at once of ``prompt`` tokens, each of which generates ``new`` tokens."""

    name: str
    batch: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """The tokens that count: generated ones, or the prompts' where one token is generated."""
        return self.batch * (self.prompt if self.new == 1 else self.new)


def workloads(most_batch: int, accelerator: bool) -> tuple[Workload, ...]:
    """Decode of one request and of many, and prompts."""
    new, prompt = (256, 2048) if accelerator else (24, 256)
    return (
        Workload("decode, batch 1", 1, 32, new),
        Workload(f"decode, batch {most_batch}", most_batch, 32, new),
        Workload(f"prefill, 4 x {prompt}", 4, prompt, 1),
    )


def cells(file: Path) -> dict[str, dict[str, str]]:
    """Cell → its variables."""
    fixed = {name: dict(variables) for name, variables in FIXED.items()}
    return {VANILLA: {"VLLM_PLUGINS": ""}, **fixed, TUNED: {"VLLM_FL_CONFIG": str(file.absolute())}}


class Engine:
    """A cell's process.

    Args:
        name: the cell's.
        variables: of its environment.
        arguments: of vLLM's ``LLM``.
        logs: the folder of its log.
    """

    def __init__(self, name: str, variables: Mapping[str, str], arguments: Mapping[str, Any], logs: Path) -> None:
        self.name, self.log = name, logs / f"{name.replace('=', '-')}.log"
        ours = set(variable_names())
        kept = {key: value for key, value in os.environ.items() if key not in ours and key != "VLLM_PLUGINS"}
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": str(logs / f"cache-{name}")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**kept, **offline, **variables},
            )

    def answer(self) -> Any:
        """The next line of its output.

        Raises:
            DispatchError: it ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise DispatchError(f"the engine '{self.name}' ended with {status}: {' '.join(last)} (its log: {self.log})")
        return json.loads(line)

    def run(self, work: Workload) -> float:
        """Tokens a second of a workload."""
        print(json.dumps([work.batch, work.prompt, work.new]), file=self.process.stdin, flush=True)
        return work.tokens / float(self.answer())

    def stop(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measure(
    variables: Mapping[str, Mapping[str, str]],
    arguments: Mapping[str, Any],
    works: Sequence[Workload],
    rounds: int,
    logs: Path,
    say: Callable[[str], None],
) -> dict[str, dict[str, list[float]]]:
    """Workload → cell → tokens a second of each round. A cell that does not start is left out, with a message.

    Raises:
        DispatchError: the tuned engine does not start, or one ends while it is measured.
    """
    engines = [Engine(name, own, arguments, logs) for name, own in variables.items()]
    try:
        for engine in list(engines):
            try:
                say(f"{engine.name}: ready after {engine.answer():.0f} s")
            except DispatchError as error:
                if engine.name == TUNED:
                    raise
                say(f"left out: {error}")
                engines.remove(engine)
        rates: dict[str, dict[str, list[float]]] = {work.name: {one.name: [] for one in engines} for work in works}
        for turn in range(-1, rounds):  # the first round warms up
            for work in works:
                for place in range(len(engines)):
                    engine = engines[(place + turn) % len(engines)]
                    rate = engine.run(work)
                    if turn >= 0:
                        rates[work.name][engine.name].append(rate)
            say(f"round {turn + 1} of {rounds}")
        return rates
    finally:
        for engine in engines:
            engine.stop()


def compared(rates: Mapping[str, Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    """One row a workload and cell: tokens a second, and the tuned engine's share of it, round by round."""
    rows = []
    for work, of_cell in rates.items():
        for name, values in of_cell.items():
            gains = [ours / other for ours, other in zip(of_cell[TUNED], values, strict=True)]
            low, high = interval(gains)
            row = {"workload": work, "cell": name, "tokens_per_s": statistics.median(values)}
            rows.append({**row, "tuned": statistics.median(gains), "low": low, "high": high})
    return rows


def disagreements(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fixed policies that an engine is faster with than with the tuned file, in words; vanilla is no policy."""
    return [
        f"{row['workload']}: {row['cell']} is {1 / row['tuned']:.3f} times as fast as the tuned file"
        for row in rows
        if row["cell"] not in (VANILLA, TUNED) and row["high"] < 1 - LEAST_LOSS
    ]


def serve(arguments: dict[str, Any]) -> None:
    """A cell's process: start the engine, then run the workload that each line of the input names."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints goes to the log
    begun = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    answers.write(json.dumps(time.perf_counter() - begun) + "\n")
    draw = random.Random(0)
    for line in sys.stdin:
        batch, prompt, new = json.loads(line)
        prompts = [{"prompt_token_ids": draw.choices(range(10, VOCABULARY), k=prompt)} for _ in range(batch)]
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        answers.write(json.dumps(time.perf_counter() - start) + "\n")


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
