"""Tokens per second of SGLang on a GPU: vanilla with several attention backends, and the plugin with several kernels.

Each cell is an engine in a separate process. Engines start one after the other, live at once, and alternate, workload
by workload, as in ``serve_vllm.py``, which provides the workloads, the comparison and the table. The model has a
published shape (``--shape``) and random weights, in bfloat16. Decode graphs are on for batches up to the largest of the
workloads; the radix cache is off. All cells except ``plugin_eager_prefill`` capture graphs of prompts too, which is
SGLang's default. In ``plugin_host_triton`` SGLang computes every operator under the plugin, in
``plugin_hosts_products`` the products with weights.

    python benchmarks/serve_sglang.py [--cells vanilla_fa3,plugin_neutral,plugin_shipped] [--rounds 5]
        [--workloads TEXT,…] [--layers 32] [--quick] [--json FILE] [--logs FOLDER]

``--quick``: 8 layers and two rounds, to check that everything runs. Needs one GPU, SGLang with its compiled operators,
and this package. If the cells do not fit on the GPU together, split them into several runs with a vanilla cell each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_vllm import NAMED, NOWHERE, VANILLA, WORKLOADS, Cell, Workload, compare, table, told
from shapes import LAYERS, SHAPES, Shape

USUAL = (*WORKLOADS[:2], NAMED[0])
"""Decode of one request and of 32, and prefill of eight prompts."""
QUICK_LAYERS, QUICK_ROUNDS = 8, 2
ATTENTION = ("fa3", "flashinfer", "triton")
STANDARD = ("vanilla_fa3", "plugin_neutral", "plugin_shipped")
CHUNK = 8192
TREE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
"""The variable to replace SGLang's radix tree in Rust, which fails with PyTorch 2.11."""
COMMON: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "disable_radix_cache": True,
    "chunked_prefill_size": CHUNK,
    "max_prefill_tokens": CHUNK,
    "mem_fraction_static": 0.85,  # of the memory free at the start; the cache has its own size
    "grammar_backend": "none",
    "random_seed": 0,
    "log_level": "info",
}


def _orders(operators: Iterable[str], token: str) -> str:
    return ";".join(f"{op}={token}" for op in operators)


def cells_of(shape: Shape) -> dict[str, Cell]:
    """Return the cells to compare for a shape."""
    operators = (*LAYERS, "kv_cache_write", *shape.attention, *shape.experts)
    vanilla = {f"{VANILLA}_{name}": Cell({"SGLANG_PLUGINS": "none"}, {"attention_backend": name}) for name in ATTENTION}
    neutral = {"SGLANG_FL_PER_OP": _orders(operators, "impl:default.triton"), "SGLANG_FL_DENY_VENDORS": "cuda"}
    return vanilla | {
        "plugin_host_triton": Cell({"SGLANG_FL_OOT_ENABLED": "0"}, {"attention_backend": "triton"}),
        "plugin_neutral": Cell(neutral),
        "plugin_shipped": Cell({}),
        "plugin_hosts_products": Cell({"SGLANG_FL_OOT_BLACKLIST": "linear"}),
        "plugin_eager_prefill": Cell({}, {"cuda_graph_backend_prefill": "disabled"}),
        "plugin_untuned": Cell({"SGLANG_FL_PLATFORM": "cuda", "XDG_CONFIG_HOME": NOWHERE}),
    }


# -- one engine -------------------------------------------------------------------------------------------------------


def serve(arguments: dict[str, Any]) -> None:
    """Run a cell's process: start the engine, then run each line's workload; ``null`` asks for the report."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's output goes to the log
    begun = time.perf_counter()
    import sglang

    engine = sglang.Engine(**arguments)
    answers.write(json.dumps(time.perf_counter() - begun) + "\n")
    draw = random.Random(0)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked is None:
            answers.write(json.dumps(_report(engine)) + "\n")
            continue
        batch, prompt, new = asked
        prompts = [draw.choices(range(10, 100_000), k=prompt) for _ in range(batch)]
        sampling = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
        start = time.perf_counter()
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - start
        assert all(output["meta_info"]["completion_tokens"] == new for output in outputs)
        answers.write(json.dumps(seconds) + "\n")
    engine.shutdown()


def _report(engine: Any) -> dict[str, Any] | None:
    """Return the part of the scheduler's report about the implementations that ran; ``None`` without the plugin."""
    if os.environ.get("SGLANG_PLUGINS") == "none":
        return None
    from sglang_fl import report

    found = report.collect(engine)[0]
    names = ("layers", "native_layers", "attention_backend", "fallen_through", "undispatched", "failed", "graphs")
    names += ("prompt_graphs",)
    manifest = found["manifest"]
    return {name: found[name] for name in names} | {"chosen": None if manifest is None else manifest["choices"]}


# -- all of them ------------------------------------------------------------------------------------------------------


def cached_tokens(workloads: Sequence[Workload]) -> int:
    """Return the tokens that a cache must hold: a generating batch, or four prefill steps, with room for SGLang's
    reserve.
    """
    most = max(work.batch * (work.prompt + work.new) if work.new > 1 else 4 * CHUNK for work in workloads)
    return (most // 1024 + 4) * 1024


def _start(name: str, cell: Cell, sizes: Mapping[str, Any], folder: Path, logs: Path) -> Any:
    from fl_dispatch.evidence.child import Child  # not above: vanilla engines run this file too

    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("VLLM_FL_", "SGLANG_FL_", "SGLANG_PLUGINS"))
    }
    fixed = {"HF_HUB_OFFLINE": "1", "TRITON_CACHE_DIR": str(folder / f"triton-{name}"), TREE: kept.get(TREE, "python")}
    arguments = {**COMMON, "model_path": str(folder), **sizes, **cell.engine}
    command = [sys.executable, __file__, "--serve", json.dumps(arguments)]
    return Child(name, command, {**kept, **fixed, **cell.variables}, logs / f"{name}.log")


def measure(
    shape: Shape,
    cells: Mapping[str, Cell],
    workloads: Sequence[Workload],
    rounds: int,
    layers: int,
    folder: Path,
    logs: Path,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Start all cells, run them alternately, and return the results, which also go to ``keep`` after each round."""
    from fl_dispatch import DispatchError  # not above: vanilla engines run this file too

    (folder / "config.json").write_text(json.dumps({**shape.config, "num_hidden_layers": layers}))
    requests = max(work.batch for work in workloads)
    sizes = {
        "max_total_tokens": cached_tokens(workloads),
        "context_length": max(work.prompt + work.new for work in workloads) + 8,
        "max_running_requests": requests,
        "cuda_graph_max_bs_decode": requests,
    }
    engines, started = {}, {}
    for name, cell in cells.items():  # one after the other: each measures the memory that is free
        print(f"starting {name}", flush=True)
        child = _start(name, cell, sizes, folder, logs)
        try:
            started[name] = child.answer()
            engines[name] = child
            print(f"{name} is ready after {started[name]:.0f} s", flush=True)
        except DispatchError as error:
            print(error, file=sys.stderr, flush=True)
    names = list(engines)
    rates: dict[str, dict[str, list[float]]] = {work.name: {name: [] for name in names} for work in workloads}
    for turn in range(-1, rounds):
        for work in workloads:
            for place in range(len(names)):
                name = names[(place + turn) % len(names)]
                seconds = engines[name].ask([work.batch, work.prompt, work.new])
                if turn >= 0:  # the first round warms up
                    rates[work.name][name].append(work.tokens / seconds)
        told(turn, rates, keep)
    reports = {name: engine.ask(None) for name, engine in engines.items()}
    for engine in engines.values():
        engine.stop()
    for name, report in reports.items():
        if not name.startswith(VANILLA) and report is None:
            raise DispatchError(f"{name} ran without the plugin; its log is {logs / f'{name}.log'}")
    return {"rates": rates, "start_s": started, "reports": reports}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--cells", help=f"of {', '.join(cells_of(SHAPES['llama-3.1-8b']))}")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--workloads", default="", metavar="TEXT,…", help="only those whose name has one of these")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LAYERS} layers, {QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve))
        return
    from importlib.metadata import version

    import torch

    shape = SHAPES[options.shape]
    layers = options.layers or (QUICK_LAYERS if options.quick else shape.layers)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else 5)
    known = cells_of(shape)
    names = options.cells.split(",") if options.cells else list(STANDARD)
    if unknown := set(names) - set(known):
        parser.error(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    texts = [text for text in options.workloads.split(",") if text]
    workloads = [
        work
        for work in (*WORKLOADS, *NAMED)
        if any(text in work.name for text in texts) or (not texts and work in USUAL)
    ]
    if not workloads:
        parser.error(f"no workload is called so; they are {'; '.join(work.name for work in (*WORKLOADS, *NAMED))}")
    needed = len(names) * shape.gib(layers, cached_tokens(workloads))
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    if needed > gib:
        parser.error(f"{len(names)} cells need about {needed:.0f} GiB, the GPU has {gib:.0f}: fewer cells, or --layers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        cells = {name: known[name] for name in names}
        found = measure(shape, cells, workloads, rounds, layers, folder, logs, options.json)
    found["compared"] = compare(found["rates"])
    found["machine"] = {
        "gpu": torch.cuda.get_device_name(0),
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "shape": options.shape,
        "cells": {name: {**known[name].variables, **known[name].engine} for name in found["start_s"]},
        "rounds": rounds,
        "layers": layers,
    }
    if options.json:
        from fl_dispatch.evidence.origin import write  # late: a vanilla engine's process imports this file too

        write(options.json, found)
    print(table(found["compared"]))


if __name__ == "__main__":
    main()
