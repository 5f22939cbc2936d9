"""The cost of shadow mode in a serving engine: the same steps with shadow mode off and on, alternately.

One vLLM engine in this process decodes a batch on a CPU. From step to step shadow mode is off, watches without drawing
a call, draws one call in a hundred, or draws all calls. Each setting's budget is 1 % of the time of its own steps, so
its clock stops during the steps of the other settings. Every operator runs a copy of its reference, which is compared
with the reference, so the second run costs as much as the first. The clock is the processor time of the process, so
other processes do not count.

    python benchmarks/shadow_cost.py [--rounds 40] [--json FILE]
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_dispatch.shadow.sampling import Sampling

SHAPE = {
    "vocab_size": 8_000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "layer_types": ["full_attention"] * 8,
}
OPERATORS = ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention")
BATCH, PROMPT, BUDGET = 8, 128, 0.01
SHARES = {"off": None, "watching only": 1e-12, "share 0.01": 0.01, "share 1": 1.0}
STEPS = 4
"""Decode steps of a round for each setting."""


class StepClock:
    """Processor seconds of the steps that ran under one setting."""

    def __init__(self) -> None:
        self._before = 0.0
        self._began: float | None = None

    def __call__(self) -> float:
        return self._before + (0.0 if self._began is None else time.process_time() - self._began)

    def run(self, step: Any) -> float:
        """Run a step; return its seconds."""
        before, self._began = self(), time.process_time()
        step()
        self._before, self._began = self(), None
        return self._before - before


def engine(model: Path) -> Any:
    """Return vLLM's engine, to be driven step by step."""
    from vllm import LLM

    sizes = {"max_model_len": 512, "max_num_seqs": BATCH, "max_num_batched_tokens": 1024}
    llm = LLM(model=str(model), dtype="float32", enforce_eager=True, kv_cache_memory_bytes=256 << 20, **sizes)
    return llm.llm_engine


def copies() -> None:
    """Register a copy of each operator's reference, which comes before it."""
    from fl_dispatch import BackendImplKind, OpImpl, SelectionPolicy, get_default_manager, set_global_policy

    registry = get_default_manager().registry
    for op_name in OPERATORS:
        reference = next(each for each in registry.get_implementations(op_name) if each.impl_id == "reference.torch")
        registry.register_impl(
            OpImpl(op_name, "vendor.copy", BackendImplKind.VENDOR, reference.fn, vendor="copy", signature="unchecked")
        )
    set_global_policy(SelectionPolicy(per_op_order=tuple((op, ("impl:vendor.copy", "reference")) for op in OPERATORS)))


def take_turns(llm_engine: Any, rounds: int) -> dict[str, Any]:
    """Return seconds of the decode steps under each setting, and the report of each setting."""
    from fl_dispatch import get_default_manager
    from fl_dispatch.shadow.sampling import Sampling, SamplingOptions
    from vllm import SamplingParams

    manager, shuffle = get_default_manager(), random.Random(0)
    clocks = {name: StepClock() for name in SHARES}
    settings: dict[str, Sampling | None] = {
        name: None
        if share is None
        else Sampling(SamplingOptions(share, None, "reference", False, BUDGET), clocks[name])
        for name, share in SHARES.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in SHARES}
    for turn in range(-1, rounds):  # the first one warms up
        order = [name for _ in range(STEPS) for name in shuffle.sample(list(SHARES), len(SHARES))]
        for number in range(BATCH):
            ids = [shuffle.randrange(10, 4000) for _ in range(PROMPT)]
            sampling = SamplingParams(temperature=0.0, max_tokens=len(order) + 2, ignore_eos=True)
            llm_engine.add_request(f"{turn}-{number}", {"prompt_token_ids": ids}, sampling)
        manager.shadow.sampling = None
        manager.republish(None)
        llm_engine.step()  # the prompts
        spent: dict[str, float] = dict.fromkeys(SHARES, 0.0)
        for name in order:
            manager.shadow.sampling = settings[name]
            manager.republish(None)
            spent[name] += clocks[name].run(llm_engine.step)
        while llm_engine.has_unfinished_requests():
            llm_engine.step()
        if turn >= 0:
            for name, value in spent.items():
                seconds[name].append(value / STEPS)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    assert not list(manager.shadow.findings.found()), "a copy differs from itself"
    return {name: summary(name, seconds, setting) for name, setting in settings.items()}


def summary(name: str, seconds: dict[str, list[float]], setting: Sampling | None) -> dict[str, Any]:
    """Return each setting's time per step as a multiple of that with shadow mode off, and its own report."""
    ratios = [mine / off for mine, off in zip(seconds[name], seconds["off"], strict=True)]
    half = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
    mean = statistics.mean(ratios)
    return {
        "step_ms": round(1e3 * statistics.median(seconds[name]), 3),
        "times_off": round(mean, 4),
        "interval_95": [round(mean - half, 4), round(mean + half, 4)],
        "own_account": None if setting is None else round(setting.share_of_time(), 4),
        "drawn_over_budget": None if setting is None else setting.passed_over,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_FL_LOG_LEVEL": "WARNING", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ["VLLM_FL_STEPS"] = "1"
    import torch

    from fl_dispatch import get_default_manager
    from fl_dispatch.cli.checkpoints import build_checkpoint
    from fl_dispatch.cli.output import print_table
    from fl_dispatch.evidence.origin import origin

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = build_checkpoint("qwen3", Path(folder), **SHAPE)
        llm_engine = engine(model)
        copies()
        found = take_turns(llm_engine, arguments.rounds)
    compared = sum(get_default_manager().shadow.findings.compared_calls().values())
    print_table(
        f"Decode steps of {BATCH} requests, budget {BUDGET:.0%}, {arguments.rounds} rounds; {compared} calls compared",
        ("shadow mode", "step, ms", "times off", "95 %", "its own account", "drawn over the budget"),
        [
            (name, row["step_ms"], row["times_off"], "{} to {}".format(*row["interval_95"]), row["own_account"],
             row["drawn_over_budget"])
            for name, row in found.items()
        ],
    )  # fmt: skip
    if arguments.json:
        data = {**origin(torch.device("cpu")), "shape": SHAPE, "batch": BATCH, "budget": BUDGET}
        arguments.json.write_text(json.dumps({**data, "rounds": arguments.rounds, "settings": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
