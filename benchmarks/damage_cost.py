"""The cost of the check for damaged requests while all is right: decode steps with and without the check, alternately.

One vLLM engine in this process decodes a batch. In one stretch of steps vLLM's V2 runner counts damaged logits and the
scheduler reads the counts (``VLLM_FL_DAMAGED_REQUESTS=recompute``); in the next stretch neither happens (``ignore``).
With ``--parts`` there are also stretches in which a part of the check runs alone, see :data:`PARTS`.
Where tokens are chosen by the kernels that find damage, "recompute" runs them in the place of vLLM's.

On a CPU the model is small, a stretch is one step, and the clock is the processor time of the process, so other
processes do not count. On a GPU the model has a published shape (``--shape``), is compiled and runs from graphs, a
stretch is 16 steps, and the clock is the wall clock, read when the device has finished.

    python benchmarks/damage_cost.py [--rounds 40] [--json FILE]
    python benchmarks/damage_cost.py --shape llama-3.2-1b [--batch 8] [--rounds 40] [--parts] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadow_cost import SHAPE as SMALL
from shapes import SHAPES

SHAPE = {**SMALL, "vocab_size": 32_000}
PROMPT, STRETCHES = 128, 8
"""Tokens of each prompt, and stretches of decode steps of a round for each setting."""
PARTS = {
    "ignore": "nothing",
    "scheduler": "the scheduler's part",
    "function": "the same, and a count function that does nothing",
    "arguments": "the same, and all that precedes a launch",
    "launch": "the same, and a launch over one column",
    "kernel": "the same, but over the logits",
    "marks": "the same, but each step has marks of its own",
    "alone": "the same, and they are read",
    "recompute": "the same, but the kernels that choose tokens find the damage (on a GPU)",
}
"""Settings → what runs in their steps, each of them more than the one before."""
SETTINGS = ("ignore", "recompute")
"""The settings without ``--parts``."""


@dataclass(frozen=True)
class Subject:
    """An engine's options, and the way to read its time."""

    options: Mapping[str, Any]
    """Options of ``vllm.LLM``, in addition to those of every subject."""
    stretch: int
    """Decode steps under one setting before the turn of the next."""
    clock: Callable[[], float]
    """Clock that reads seconds after all steps so far have ended."""


def on_a_cpu(folder: Path) -> Subject:
    """Return a small model with weights in ``folder``."""
    from fl_dispatch.cli.checkpoints import build_checkpoint

    model = build_checkpoint("qwen3", folder, **SHAPE)
    return Subject({"model": str(model), "dtype": "float32", "enforce_eager": True}, 1, time.process_time)


def on_a_gpu(folder: Path, shape: str) -> Subject:
    """Return a published shape; its configuration is written into ``folder``."""
    import torch

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    (folder / "config.json").write_text(json.dumps(SHAPES[shape].config))
    made = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "gpu_memory_utilization": 0.3}
    return Subject({"model": str(folder), **made}, 16, clock)


class Check:
    """The places of the check in an engine of this process, which run or not.

    Args:
        runner: vLLM's V2 model runner.
        batch: the number of requests.
    """

    def __init__(self, runner: Any, batch: int) -> None:
        import torch
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.worker.gpu.async_utils import AsyncOutput
        from vllm.v1.worker.gpu.sample import sampler

        from fl_dispatch.hosting.damage.rows import host_marks

        assert runner.sampler.compute_nans, "the engine contains no damage"
        self.sampler, self.module, self.count = runner.sampler, sampler, sampler.get_num_nans
        self.hooks = [
            ("scheduler", Scheduler, "update_from_output", Scheduler.update_from_output),
            ("marks", runner, "sample", runner.sample),
            ("alone", AsyncOutput, "get_output", AsyncOutput.get_output),
        ]
        if self.count.both is not None:
            self.hooks.append(("recompute", runner.sampler, "sample", runner.sampler.sample))
        self.both = self.count.both
        column = torch.zeros(batch, 1, dtype=runner.dtype, device=runner.device)
        memory, unlaunched = host_marks(batch), host_marks(batch)
        slot, other = memory and memory.mark(column), unlaunched and unlaunched.mark(column)
        assert slot, "this device does not write its marks to host memory"
        unlaunched._launches = dict.fromkeys(unlaunched._launches, lambda *_: None)

        def nothing(logits: Any) -> None:
            pass

        def arguments(logits: Any) -> None:
            unlaunched.mark(column, other)

        def launch(logits: Any) -> None:
            memory.mark(column, slot)

        def kernel(logits: Any) -> None:
            memory.mark(logits, slot)

        self.functions = {"function": nothing, "arguments": arguments, "launch": launch, "kernel": kernel}

    def become(self, setting: str) -> None:
        """Let a setting's parts run, and no others."""
        order = list(PARTS)
        for first, owner, name, hook in self.hooks:
            runs = order.index(setting) >= order.index(first)
            setattr(owner, name, hook if runs else hook.__wrapped__)
        self.count.both = self.both if setting == "recompute" else None
        self.sampler.compute_nans = setting not in ("ignore", "scheduler")
        self.module.get_num_nans = self.functions.get(setting, self.count)


def take_turns(subject: Subject, batch: int, rounds: int, settings: Sequence[str]) -> dict[str, list[float]]:
    """Return the seconds of a decode step under each setting, round by round."""
    from vllm import LLM, SamplingParams

    tokens = STRETCHES * len(settings) * subject.stretch + 8
    sizes = {"max_model_len": max(1024, PROMPT + tokens), "max_num_seqs": batch, "max_num_batched_tokens": 1024}
    llm_engine = LLM(**subject.options, **sizes, kv_cache_memory_bytes=1 << 30).llm_engine
    core = llm_engine.engine_core.engine_core
    check = Check(core.model_executor.driver_worker.worker.model_runner, batch)
    shuffle, seconds = random.Random(0), {name: list[float]() for name in settings}
    for turn in range(-1, rounds):  # the first one warms up
        order = [name for _ in range(STRETCHES) for name in shuffle.sample(settings, len(settings))]
        for number in range(batch):
            ids = [shuffle.randrange(10, 4000) for _ in range(PROMPT)]
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            llm_engine.add_request(f"{turn}-{number}", {"prompt_token_ids": ids}, sampling)
        for _ in range(2 + batch * PROMPT // sizes["max_num_batched_tokens"]):  # the prompts
            llm_engine.step()
        spent = dict.fromkeys(settings, 0.0)
        for name in order:
            check.become(name)
            began = subject.clock()
            for _ in range(subject.stretch):
                llm_engine.step()
            spent[name] += subject.clock() - began
        while llm_engine.has_unfinished_requests():
            llm_engine.step()
        if turn >= 0:
            for name, value in spent.items():
                seconds[name].append(value / STRETCHES / subject.stretch)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def interval(values: Sequence[float], digits: int) -> tuple[float, list[float]]:
    """Return the mean and its interval of 95 %."""
    half = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.mean(values)
    return round(mean, digits), [round(mean - half, digits), round(mean + half, digits)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--shape", choices=SHAPES, help="on a GPU: the model")
    parser.add_argument("--batch", type=int, default=8, help="requests that decode")
    parser.add_argument("--parts", action="store_true", help="also measure parts of the check")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("an interval needs --rounds 2 or more")
    settings = tuple(PARTS) if arguments.parts else SETTINGS
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_FL_LOG_LEVEL": "WARNING", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ["VLLM_FL_STEPS"] = "1"
    if not arguments.shape:
        os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from fl_dispatch.cli.output import print_table
    from fl_dispatch.evidence.origin import write

    if not arguments.shape:
        torch.set_num_threads(1)
    shape = SHAPES[arguments.shape].config if arguments.shape else SHAPE
    with tempfile.TemporaryDirectory() as folder:
        subject = on_a_gpu(Path(folder), arguments.shape) if arguments.shape else on_a_cpu(Path(folder))
        seconds = take_turns(subject, arguments.batch, arguments.rounds, settings)
    step_ms = {name: round(1e3 * statistics.median(values), 3) for name, values in seconds.items()}
    ratios, more = {}, {}
    for name, values in seconds.items():
        pairs = list(zip(values, seconds["ignore"], strict=True))
        ratios[name] = [value / without for value, without in pairs]
        more[name] = interval([1e6 * (value - without) for value, without in pairs], 1)
    rows = []
    for name in settings:
        mean, limits = interval(ratios[name], 4)
        us, of_us = more[name]
        rows.append((name, PARTS[name], step_ms[name], mean, "{} to {}".format(*limits), us, "{} to {}".format(*of_us)))
    print_table(
        f"Decode steps, {arguments.batch} requests, {shape['vocab_size']} words, {arguments.rounds} rounds in turns",
        ("setting", "what runs of the check", "step, ms", "times ignore", "95 %", "µs more", "95 %"),
        rows,
    )
    found = {
        "step_ms": step_ms,
        "ratio_median": round(statistics.median(ratios["recompute"]), 4),
        "ratio_mean": mean,
        "interval_95": limits,
        "more_than_ignore_us": {name: {"mean": us, "interval_95": limits} for name, (us, limits) in more.items()},
    }
    if arguments.json:
        write(arguments.json, {"shape": shape, "batch": arguments.batch, "rounds": arguments.rounds, **found})


if __name__ == "__main__":
    main()
