"""The cost of containing damage while all is right: the same decode steps with it and without, in turns.

One vLLM engine in this process decodes a batch on a CPU. From step to step vLLM's V2 runner counts damaged logits and
the scheduler looks at the counts (``VLLM_FL_DAMAGED_REQUESTS=recompute``), or neither does (``ignore``). Time is the
processor time of the process, so that work beside it does not count.

    python benchmarks/damage_cost.py [--rounds 40] [--json FILE]
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
from pathlib import Path
from typing import Any

from shadow_cost import SHAPE as SMALL

SHAPE = {**SMALL, "vocab_size": 32_000}
BATCH, PROMPT, STEPS = 8, 128, 8
"""Requests, tokens of each prompt, and decode steps of a round for each setting."""
SETTINGS = ("ignore", "recompute")


def engine(model: Path) -> Any:
    """vLLM's engine, to be driven step by step."""
    from vllm import LLM

    sizes = {"max_model_len": 512, "max_num_seqs": BATCH, "max_num_batched_tokens": 1024}
    llm = LLM(model=str(model), dtype="float32", enforce_eager=True, kv_cache_memory_bytes=256 << 20, **sizes)
    return llm.llm_engine


def take_turns(llm_engine: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of a decode step under each setting, round by round."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm import SamplingParams

    core = llm_engine.engine_core.engine_core
    sampler = core.model_executor.driver_worker.worker.model_runner.sampler
    assert sampler.compute_nans, "the engine contains no damage"
    containing = Scheduler.schedule, Scheduler.update_from_output
    bare = Scheduler.schedule.__wrapped__, Scheduler.update_from_output.__wrapped__
    shuffle, seconds = random.Random(0), {name: list[float]() for name in SETTINGS}
    for turn in range(-1, rounds):  # the first one warms up
        order = [name for _ in range(STEPS) for name in shuffle.sample(SETTINGS, len(SETTINGS))]
        for number in range(BATCH):
            ids = [shuffle.randrange(10, 4000) for _ in range(PROMPT)]
            sampling = SamplingParams(temperature=0.0, max_tokens=len(order) + 4, ignore_eos=True)
            llm_engine.add_request(f"{turn}-{number}", {"prompt_token_ids": ids}, sampling)
        llm_engine.step()  # the prompts
        llm_engine.step()
        spent = dict.fromkeys(SETTINGS, 0.0)
        for name in order:
            contains = name == "recompute"
            sampler.compute_nans = contains
            Scheduler.schedule, Scheduler.update_from_output = containing if contains else bare
            began = time.process_time()
            llm_engine.step()
            spent[name] += time.process_time() - began
        while llm_engine.has_unfinished_requests():
            llm_engine.step()
        if turn >= 0:
            for name, value in spent.items():
                seconds[name].append(value / STEPS)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("an interval needs --rounds 2 or more")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"VLLM_FL_LOG_LEVEL": "WARNING", "VLLM_LOGGING_LEVEL": "WARNING"}
    import torch

    from fl_dispatch.cli.checkpoints import build_checkpoint
    from fl_dispatch.cli.output import print_table
    from fl_dispatch.evidence.origin import origin

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        seconds = take_turns(engine(build_checkpoint("qwen3", Path(folder), **SHAPE)), arguments.rounds)
    ratios = [on / off for on, off in zip(seconds["recompute"], seconds["ignore"], strict=True)]
    half = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
    mean = statistics.mean(ratios)
    found = {
        "step_ms": {name: round(1e3 * statistics.median(values), 3) for name, values in seconds.items()},
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_mean": round(mean, 4),
        "interval_95": [round(mean - half, 4), round(mean + half, 4)],
    }
    print_table(
        f"Decode steps of {BATCH} requests, {SHAPE['vocab_size']} words, {arguments.rounds} rounds in turns",
        ("damaged requests", "step, ms", "times ignore: median", "mean", "95 %"),
        [
            ("ignore", found["step_ms"]["ignore"], 1, 1, ""),
            ("recompute", found["step_ms"]["recompute"], found["ratio_median"], found["ratio_mean"],
             "{} to {}".format(*found["interval_95"])),
        ],
    )  # fmt: skip
    if arguments.json:
        data = {**origin(torch.device("cpu")), "shape": SHAPE, "batch": BATCH, "rounds": arguments.rounds, **found}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
