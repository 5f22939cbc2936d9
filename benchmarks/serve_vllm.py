"""Tokens per second of vLLM on a GPU: vanilla with two attention backends, and the plugin with several kernel choices.

Each cell is an engine in a separate process. All engines live at once and alternate, workload by workload, so that a
change of the machine's speed affects all alike; a waiting engine uses no GPU time. The model has a published shape
(``--shape``) and random weights. ``torch.compile`` and CUDA graphs (FULL_AND_PIECEWISE) are on, prefix caching is off,
and generation ignores the end token. Decoding is greedy, except that shapes with experts sample. Their routers get
weights that distinguish tokens (:func:`spread_routing`); otherwise the number of experts read by a step would be
accidental.

Each round of a cell is compared with the better vanilla of the same round and workload. The interval over the rounds
contains the true median ratio with a probability of at least 0.9 (:mod:`fl_dispatch.evidence.intervals`). With fewer
than five rounds it is from the smallest to the largest ratio. With ``--profile`` each cell runs each workload once more
under PyTorch's profiler and writes the time of every kernel to a file, which explains differences.

    python benchmarks/serve_vllm.py [--shape llama-3.1-8b] [--cells vanilla_fa3,plugin_neutral] [--rounds 5]
        [--layers 32] [--lora RANK] [--json FILE] [--profile FILE]

Several runs may start their engines at once: the variable ``BENCHMARK_TURN`` names a lock file, which each run holds
from its first round to its last.

With ``--lora`` every request has the same adapter of that rank, with random factors for all projections.

Needs one GPU, vLLM with its compiled operators, and this package. If the cells do not fit on the GPU together, split
them into several runs with a vanilla cell each, or use fewer layers.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import kernel_trace
from shapes import LAYERS, SHAPES, Shape


@dataclass(frozen=True)
class Workload:
    """``batch`` requests at once of ``prompt`` tokens, each generating ``new`` tokens.

    With ``apart`` the time of a run with one generated token is subtracted, which leaves the time of decoding.
    """

    name: str
    batch: int
    prompt: int
    new: int
    apart: bool = False

    @property
    def tokens(self) -> int:
        """The counted tokens: generated ones, or the prompts' if one token is generated."""
        return self.batch * (self.prompt if self.new == 1 else self.new - self.apart)


WORKLOADS = (
    Workload("decode, batch 1", 1, 128, 256),
    Workload("decode, batch 32", 32, 128, 256),
    Workload("decode, batch 256", 256, 128, 128),
    Workload("prefill, 64 x 2048", 64, 2048, 1),
)
NAMED = (
    Workload("decode, batch 8", 8, 128, 256),
    Workload("decode, batch 64", 64, 128, 256),
    Workload("prefill, 8 x 2048", 8, 2048, 1),
    Workload("both, 16 x 8192", 16, 8192, 128),
    Workload("both, 2 x 32768", 2, 32_768, 128),
    Workload("long decode, 32768", 1, 32_768, 641, True),
    Workload("long decode, 131072", 1, 131_072, 641, True),
    Workload("prefill, 1 x 32768", 1, 32_768, 1),
)
"""Workloads for ``--workloads``: short ones for GPUs too small for four engines with the larger caches, and long
contexts, which count generated tokens over the time of prefill and decode."""


@dataclass(frozen=True)
class Cell:
    """One engine: its environment variables, further arguments of ``LLM``, and one of :data:`CHANGES`."""

    variables: Mapping[str, str]
    engine: Mapping[str, Any] = field(default_factory=dict)
    change: str = ""


def _orders(operators: Iterable[str], token: str) -> str:
    return ";".join(f"{op}={token}" for op in operators)


VANILLA = "vanilla"
NATIVE = {"VLLM_FL_NATIVE_PLATFORM": "1"}
NOWHERE = "/nonexistent"
"""A configuration folder without the user's files."""
NEUTRAL = {"VLLM_FL_DENY_VENDORS": "cuda"}
FEW_GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 32, 256]}}
"""Only the workloads' batch sizes, because FlagGems tunes its matrix products for minutes for each size."""

ROTATIONS = {"VLLM_FL_FUSE_ROPE_KVCACHE": "1"}
"""Fuse the rotations and the write of keys and values into one operator in compiled graphs."""
SINGLE, STEPS = {"VLLM_FL_STEPS": "1"}, {"VLLM_FL_STEPS": "8"}
"""Make one step per scheduler call, and up to eight."""


def cells_of(shape: Shape) -> dict[str, Cell]:
    """Return the cells to compare for a shape. All plugin cells use the plugin's own latent attention."""
    host = _orders(LAYERS, "reference")
    ours = _orders(("kv_cache_write", *shape.attention, *shape.experts), "impl:default.triton")
    cells = {
        f"{VANILLA}_{name}": Cell({"VLLM_PLUGINS": ""}, {"attention_backend": backend})
        for name, backend in shape.vanilla.items()
    }
    if not shape.latent:
        chosen = {"fa3": "flash_attn", "triton": "triton_attn"}
        for name, impl in chosen.items():
            orders = f"{host};attention_backend=impl:vendor.cuda.{impl}"
            cells[f"plugin_host_{name}"] = Cell({**NATIVE, "VLLM_FL_PER_OP": orders})
        orders = f"{host};kv_cache_write=vendor;paged_attention=impl:vendor.cuda.fa3"
        cells["plugin_fa3"] = Cell({"VLLM_FL_PER_OP": orders})
    neutral = {"VLLM_FL_PER_OP": _orders(shape.operators, "impl:default.triton"), **NEUTRAL}
    cells |= {
        "plugin_aten": Cell({**neutral, "VLLM_FL_FLAGOS_WHITELIST": "mm,bmm"}, FEW_GRAPHS),
        "plugin_aten_all": Cell({**neutral, "VLLM_FL_ATEN_REPLACEMENT": "1"}, FEW_GRAPHS),
    }
    return cells | {
        "plugin_compiled": Cell({"VLLM_FL_PREFER": "vendor"}),
        "plugin_neutral": Cell(neutral),
        "plugin_inductor": Cell({"VLLM_FL_PER_OP": f"{host};{ours}", **NEUTRAL}),
        "plugin_shipped": Cell({}),
        "plugin_rotations": Cell(ROTATIONS),
        "plugin_single": Cell(SINGLE),
        "plugin_steps": Cell(STEPS),
        "plugin_shadow": Cell({"VLLM_FL_SHADOW_SHARE": "0.01"}),
        "plugin_untuned": Cell({"VLLM_FL_PLATFORM": "cuda", "XDG_CONFIG_HOME": NOWHERE}),
        "plugin_tuned": Cell({}),  # with --tuned
        "plugin_shipped_native": Cell(NATIVE),
    }


PROFILED_STEPS = 16
COUNTERS = "counters"
"""The request for an engine's counters, in place of a workload."""


def cached_tokens(workloads: Sequence[Workload]) -> int:
    """Return the tokens that a cache must hold: a generating batch, or two prefill steps."""
    most = max(work.batch * (work.prompt + work.new) if work.new > 1 else 2 * 8192 for work in workloads)
    return (most // 16 + 64) * 16


STANDARD = ("vanilla_fa3", "vanilla_triton", "plugin_host_triton", "plugin_neutral", "plugin_shipped")
COMMON = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.15,  # must be free at the start; the cache has its own size
    "jit_monitor_verbose": True,
}


# -- one engine -------------------------------------------------------------------------------------------------------


def serve(arguments: dict[str, Any]) -> None:
    """Run a cell's process: start the engine, then run the workload of each input line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's output goes to the log
    begun = time.perf_counter()
    from vllm import LLM, SamplingParams

    changes, adapter = arguments.pop("changes"), arguments.pop("adapter", None)
    llm = LLM(**arguments)
    asked: dict[str, Any] = {}
    if adapter is not None:
        from vllm.lora.request import LoRARequest

        asked["lora_request"] = LoRARequest("adapter", 1, adapter)
    for change in changes:
        llm.apply_model(CHANGES[change])
    report = llm.collective_rpc("fl_report")[0] if "fl_dispatch" in sys.modules else None
    answers.write(json.dumps({"start_s": time.perf_counter() - begun, "report": _essence(report)}) + "\n")
    draw = random.Random(0)
    for line in sys.stdin:
        if (order := json.loads(line)) == COUNTERS:
            counted = llm.get_metrics() if arguments.get("disable_log_stats") is False else []
            found = {metric.name: metric.value for metric in counted if hasattr(metric, "value")}
            answers.write(json.dumps(found) + "\n")
            continue
        batch, prompt, new, temperature, profiled = order
        prompts = [{"prompt_token_ids": draw.choices(range(10, 100_000), k=prompt)} for _ in range(batch)]
        sampling = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True, detokenize=False)
        if profiled:
            llm.start_profile()
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False, **asked)
        seconds = time.perf_counter() - start
        if profiled:
            llm.stop_profile()
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        answers.write(json.dumps(seconds) + "\n")


def spread_routing(model: Any) -> None:
    """Give routers weights that choose different experts for different tokens, in place.

    With vLLM's random weights, which are all near zero, scores are nearly equal. The number of experts read by a step
    then depends on how the host compares scores, and affects the time more than the kernels do.
    """
    import torch

    torch.manual_seed(0)
    routers = 0
    for name, weight in model.named_parameters():
        if name.endswith(".mlp.gate.weight"):
            weight.data.normal_(std=weight.shape[1] ** -0.5)
            routers += 1
        elif name.endswith(".post_attention_layernorm.weight"):
            weight.data.fill_(1.0)
    if not routers:
        raise ValueError("no weights of a router were found, by the end '.mlp.gate.weight' of their names")


def fill_quantized(model: Any) -> None:
    """Give quantized weights random numbers, in place.

    vLLM's random weights are so small that nearly all are zero in fp8, and its integer weights are uninitialized
    memory. A power-limited GPU multiplies zeros faster.
    """
    import torch

    torch.manual_seed(0)
    filled = 0
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or (weight.itemsize > 1 and weight.dtype is not torch.int32):
            continue
        if weight.is_floating_point():
            weight.data.copy_(torch.randn(weight.shape, device=weight.device).mul_(32))
        elif name.endswith(("weight", "weight_packed")):
            limits = torch.iinfo(weight.dtype)
            weight.data.random_(limits.min, limits.max)
        else:
            continue
        filled += 1
    if not filled:
        raise ValueError("no quantized weights were found")


CHANGES = {"spread_routing": spread_routing, "fill_quantized": fill_quantized}


def _essence(report: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the part of a worker's report about the implementations that ran."""
    if report is None:
        return None
    manifest = report["manifest"]
    return {name: report[name] for name in ("layers", "native_layers", "attention", "failed", "compiled")} | {
        "chosen": None if manifest is None else manifest["choices"],
        "aten": {name: report["aten"]["FlagGems"][name] for name in ("why_not", "calls", "native", "wrong")},
    }


class Engine:
    """A cell's process, as seen from this one."""

    def __init__(
        self,
        name: str,
        cell: Cell,
        model: Path,
        sizes: Mapping[str, Any],
        experts: bool,
        logs: Path,
        profiled: bool,
        parallel: int,
    ) -> None:
        self.temperature = 1.0 if experts else 0.0
        self.name, self.log, self.traces = name, logs / f"{name}.log", logs / f"traces-{name}"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_FL_", "VLLM_PLUGINS"))}
        fixed = {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the function that changes the weights is sent to the worker
        }
        caches = {"VLLM_CACHE_ROOT": str(model / f"cache-{name}"), "TRITON_CACHE_DIR": str(model / f"triton-{name}")}
        arguments = {**COMMON, "model": str(model), **sizes, **cell.engine}
        arguments["changes"] = [change for change in (cell.change, experts and "spread_routing") if change]
        if parallel > 1:
            arguments["tensor_parallel_size"] = parallel
        if profiled:
            folder = str(self.traces.resolve())
            arguments["profiler_config"] = {
                "profiler": "torch",
                "torch_profiler_dir": folder,
                "torch_profiler_with_stack": False,
                "torch_profiler_dump_cuda_time_total": False,
            }
        from fl_dispatch.evidence.child import Child  # not above: vanilla engines run this file too

        self.child = Child(
            name,
            [sys.executable, __file__, "--serve", json.dumps(arguments)],
            {**kept, **fixed, **caches, **cell.variables},
            self.log,
        )

    def run(self, work: Workload, new: int | None = None, profiled: bool = False) -> float:
        """Return the seconds of a workload."""
        return float(self.child.ask([work.batch, work.prompt, new or work.new, self.temperature, profiled]))

    def profile(self, work: Workload) -> dict[str, Any]:
        """Return the GPU's work in at most :data:`PROFILED_STEPS` steps of a workload."""
        steps = min(work.new, PROFILED_STEPS)
        earlier = set(self.traces.glob("*.json.gz"))
        self.run(work, steps, profiled=True)
        first = min(set(self.traces.glob("*.json.gz")) - earlier)  # of several ranks; names end in the rank
        return {"steps": steps, **kernel_trace.read(first)}

    def counters(self) -> dict[str, float]:
        """Return vLLM's counters since the start, by name; empty unless the cell turns ``disable_log_stats`` off."""
        return dict(self.child.ask(COUNTERS))

    def late_compilations(self) -> int:
        """Count the kernels that the log reports as compiled or tuned after the engine was ready."""
        return self.log.read_text(errors="replace").count(" during inference: ")


def write_adapter(folder: Path, config: Mapping[str, Any], layers: int, rank: int) -> Path:
    """Write an adapter of all projections of a dense model, with small random factors, in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    query, key = heads * head_dim, config["num_key_value_heads"] * head_dim
    sizes = {
        "self_attn.q_proj": (query, hidden),
        **{f"self_attn.{name}_proj": (key, hidden) for name in ("k", "v")},
        "self_attn.o_proj": (hidden, query),
        **{f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, inner),
    }
    factors = {}
    for layer in range(layers):
        for name, (rows, columns) in sizes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            factors[f"{module}.lora_A.weight"] = torch.randn(rank, columns, dtype=torch.bfloat16) * 1e-2
            factors[f"{module}.lora_B.weight"] = torch.randn(rows, rank, dtype=torch.bfloat16) * 1e-2
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "lora_dropout": 0.0}
    targets = sorted(name.rpartition(".")[2] for name in sizes)
    (folder / "adapter_config.json").write_text(json.dumps({**described, "target_modules": targets}))
    return folder


# -- all of them ------------------------------------------------------------------------------------------------------


def measure(
    shape: Shape,
    cells: Mapping[str, Cell],
    workloads: Sequence[Workload],
    rounds: int,
    layers: int,
    folder: Path,
    logs: Path,
    profiled: bool,
    parallel: int,
    keep: Path | None = None,
    rank: int = 0,
) -> dict[str, Any]:
    """Start all cells, run them alternately, and return the results, which also go to ``keep`` after each round."""
    from fl_dispatch import DispatchError  # not above: vanilla engines run this file too

    longest = max(work.prompt + work.new for work in workloads)
    config = {**shape.config, "num_hidden_layers": layers}  # weights are random, so any context length works
    config["max_position_embeddings"] = max(longest, config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config))
    cache = shape.cache_bytes(layers, cached_tokens(workloads)) // parallel
    experts = bool(shape.experts)
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": cache, "max_model_len": longest}
    if rank:
        adapter = write_adapter(folder / "adapter", shape.config, layers, rank)
        sizes |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "adapter": str(adapter)}
    engines = [Engine(name, cell, folder, sizes, experts, logs, profiled, parallel) for name, cell in cells.items()]
    started: dict[str, Any] = {}
    for engine in list(engines):
        try:
            started[engine.name] = engine.child.answer()
            if not engine.name.startswith(VANILLA) and started[engine.name]["report"] is None:
                raise DispatchError(f"{engine.name} runs without the plugin; its log is {engine.log}")
        except DispatchError as error:
            print(error, file=sys.stderr, flush=True)
            engines.remove(engine)
    if not engines:
        raise SystemExit("no engine started")
    print("ready:", {name: round(data["start_s"]) for name, data in started.items()}, flush=True)
    rates: dict[str, dict[str, list[float]]] = {work.name: {e.name: [] for e in engines} for work in workloads}
    held = _turn()
    for turn in range(-1, rounds):
        for work in workloads:
            for place in range(len(engines)):
                engine = engines[(place + turn) % len(engines)]
                seconds = engine.run(work) - (engine.run(work, 1) if work.apart else 0.0)
                if turn >= 0:  # the first round warms up
                    rates[work.name][engine.name].append(work.tokens / seconds)
        told(turn, rates, keep)
    late = {engine.name: engine.late_compilations() for engine in engines}
    counters = {engine.name: engine.counters() for engine in engines}
    profiles = {e.name: {work.name: e.profile(work) for work in workloads} for e in engines} if profiled else {}
    for engine in engines:
        engine.child.stop()
    if held is not None:
        held.close()
    return {
        "rates": rates,
        "started": started,
        "late_compilations": late,
        "counters": counters,
        "profiles": profiles,
    }


def _turn() -> IO[str] | None:
    """Wait for the lock shared by the runs on this machine, and return it."""
    name = os.environ.get("BENCHMARK_TURN")
    if name is None:
        return None
    file = open(name, "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def told(turn: int, rates: Mapping[str, Mapping[str, list[float]]], keep: Path | None) -> None:
    """Print a round and write all rounds so far, because a later one may be cut off."""
    last = ((work, name, values[-1]) for work, cells in rates.items() for name, values in cells.items() if values)
    print(f"round {turn}", *(f"{work}, {name}: {rate:,.0f}" for work, name, rate in last), sep="\n  ", flush=True)
    if keep is not None and turn >= 0:
        keep.write_text(json.dumps({"rates": rates, "compared": compare(rates)}, indent=1))


def compare(rates: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return workload → cell → median tokens per second, and median and interval of the ratio to the better vanilla."""
    from fl_dispatch.evidence.intervals import interval  # not above: vanilla engines run this file too

    result: dict[str, dict[str, dict[str, float]]] = {}
    for work, cells in rates.items():
        vanilla = [values for name, values in cells.items() if name.startswith(VANILLA)]
        result[work] = {}
        for name, values in cells.items():
            row = {"tokens_per_s": statistics.median(values)}
            if vanilla:
                ratios = [value / max(best) for value, *best in zip(values, *vanilla, strict=True)]
                low, high = interval(ratios)
                row |= {"ratio": statistics.median(ratios), "low": low, "high": high}
            result[work][name] = row
    return result


def table(result: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return the comparison as Markdown."""
    lines = ["| workload | cell | tokens/s | of the better vanilla |", "|---|---|---|---|"]
    for work, cells in result.items():
        for name, row in cells.items():
            ratio = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" if "ratio" in row else ""
            lines.append(f"| {work} | {name} | {row['tokens_per_s']:,.0f} | {ratio} |")
    return "\n".join(lines)


def _installed(tuned: Path, config: Path) -> Path:
    """Install a platform file and its evidence as the user's own in a configuration folder; return the folder."""
    platforms = config / "fl_dispatch" / "platforms"
    platforms.mkdir(parents=True)
    for file in (tuned, tuned.with_name(f"{tuned.stem}.evidence.json")):
        shutil.copy(file, platforms)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--cells", help=f"of {', '.join(cells_of(SHAPES['llama-3.1-8b']))}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--workloads", default="", metavar="TEXT,…", help="only those whose name has one of these texts"
    )
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument(
        "--tuned", type=Path, metavar="FILE", help="a platform file of fl tune, for the cell plugin_tuned"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS", help="divide each engine among GPUs")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="every request has an adapter of that rank")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="time of each kernel, as JSON; printed too")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve))
        return
    import torch

    import vllm

    shape = SHAPES[options.shape]
    layers = options.layers or shape.layers
    known = cells_of(shape)
    names = options.cells.split(",") if options.cells else [name for name in STANDARD if name in known]
    if unknown := set(names) - set(known):
        parser.error(f"{options.shape} has no cell {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    if options.lora and (shape.experts or shape.latent):
        parser.error(f"--lora is for dense models with plain attention, and {options.shape} is none")
    texts = options.workloads.split(",") if options.workloads else [work.name for work in WORKLOADS]
    workloads = [work for work in (*WORKLOADS, *NAMED) if any(text in work.name for text in texts)]
    if not workloads:
        parser.error(f"no workload is called so; they are {'; '.join(work.name for work in (*WORKLOADS, *NAMED))}")
    if ("plugin_tuned" in names) != (options.tuned is not None):
        parser.error("the cell plugin_tuned and --tuned FILE belong together")
    needed, gib = (
        len(names) * shape.gib(layers, cached_tokens(workloads)) / options.tensor_parallel,
        torch.cuda.get_device_properties(0).total_memory / 2**30,
    )
    if needed > gib:
        parser.error(f"{len(names)} cells need about {needed:.0f} GiB, the GPU has {gib:.0f}: fewer cells, or --layers")
    cells = {name: known[name] for name in names}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.tuned:
            cells["plugin_tuned"] = Cell({"XDG_CONFIG_HOME": str(_installed(options.tuned, folder / "config"))})
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        profiled = options.profile is not None
        found = measure(
            shape,
            cells,
            workloads,
            options.rounds,
            layers,
            folder,
            logs,
            profiled,
            options.tensor_parallel,
            options.json,
            options.lora,
        )
    found["compared"] = compare(found["rates"])
    found["machine"] = {
        "gpu": torch.cuda.get_device_name(0),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "shape": options.shape,
        "cells": {name: {**known[name].variables, **known[name].engine} for name in found["started"]},
        "rounds": options.rounds,
        "layers": layers,
        "sampled, routers spread": bool(shape.experts),
        "tensor_parallel": options.tensor_parallel,
        "lora": options.lora,
    }
    if options.profile:
        options.profile.write_text(json.dumps(found["profiles"], indent=1))
        for cell, works in found["profiles"].items():
            for work, traced in works.items():
                print(f"\n{cell}, {work}: {kernel_trace.table(traced, traced['steps'])}")
    del found["profiles"], found["counters"]
    if options.json:
        from fl_dispatch.evidence.origin import write  # late: a vanilla engine's process imports this file too

        write(options.json, found)
    print(table(found["compared"]))
    print("compiled after the start:", found["late_compilations"])


if __name__ == "__main__":
    main()
