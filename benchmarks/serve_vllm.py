"""Tokens a second of vLLM on a GPU: vanilla with two attentions, and the plugin with several choices of kernels.

Each cell is an engine in a process of its own. All of them live at once and take turns, workload by workload, so that a
change of the machine's speed hits all alike; one that waits uses no time of the GPU. The model has the shape of
Llama-3.1-8B and random weights. ``torch.compile`` and CUDA graphs (FULL_AND_PIECEWISE) are on, prefix caching is off,
generation is greedy and ignores the end token. A round of a cell is compared with the better vanilla of that round and
workload; the interval over the rounds is from the least to the largest of these ratios, which holds the median with
probability ``1 - 2 ** (1 - rounds)``.

    python benchmarks/serve_vllm.py [--cells vanilla_fa3,plugin_neutral] [--rounds 5] [--json FILE] [--logs FOLDER]

Needs one GPU with about 27 GiB a cell, vLLM with its compiled operators, and this package installed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Llama-3.1-8B."""
OPERATORS = ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention")


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


WORKLOADS = (
    Workload("decode, batch 1", 1, 128, 256),
    Workload("decode, batch 32", 32, 128, 256),
    Workload("decode, batch 256", 256, 128, 128),
    Workload("prefill, 64 x 2048", 64, 2048, 1),
)


@dataclass(frozen=True)
class Cell:
    """One engine: what stands in its environment, and further arguments of ``LLM``."""

    variables: Mapping[str, str]
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vanilla(self) -> bool:
        """Whether our plugin is off."""
        return self.variables.get("VLLM_PLUGINS") == ""


def _all(token: str) -> str:
    return ";".join(f"{op}={token}" for op in OPERATORS)


NATIVE = {"VLLM_FL_NATIVE_PLATFORM": "1"}
HOST = "rms_norm=reference;silu_and_mul=reference;rotary_embedding=reference"
"""vLLM itself leaves these layers to PyTorch and Inductor when it compiles."""
CELLS = {
    "vanilla_fa3": Cell({"VLLM_PLUGINS": ""}, {"attention_backend": "FLASH_ATTN"}),
    "vanilla_triton": Cell({"VLLM_PLUGINS": ""}, {"attention_backend": "TRITON_ATTN"}),
    "plugin_host_fa3": Cell({**NATIVE, "VLLM_FL_PER_OP": f"{HOST};attention_backend=impl:vendor.cuda.flash_attn"}),
    "plugin_host_triton": Cell({**NATIVE, "VLLM_FL_PER_OP": f"{HOST};attention_backend=impl:vendor.cuda.triton_attn"}),
    "plugin_fa3": Cell(
        {"VLLM_FL_PER_OP": f"{HOST};kv_cache_write=vendor;paged_attention=impl:vendor.cuda.fa3"},
    ),
    "plugin_compiled": Cell({"VLLM_FL_PREFER": "vendor"}),
    "plugin_neutral": Cell({"VLLM_FL_PER_OP": _all("impl:default.triton"), "VLLM_FL_DENY_VENDORS": "cuda"}),
    "plugin_inductor": Cell(
        {
            "VLLM_FL_PER_OP": f"{HOST};kv_cache_write=impl:default.triton;paged_attention=impl:default.triton",
            "VLLM_FL_DENY_VENDORS": "cuda",
        }
    ),
    "plugin_shipped": Cell({}),
    "plugin_shipped_native": Cell(NATIVE),
}
STANDARD = ("vanilla_fa3", "vanilla_triton", "plugin_host_triton", "plugin_neutral", "plugin_shipped")
COMMON = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 4096,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.15,  # only what vLLM asks to be free at start: the cache has a size of its own
    "kv_cache_memory_bytes": (256 * (128 + 128) // 16 + 64) * 16 * 32 * 8 * 128 * 2 * 2,
    "jit_monitor_verbose": True,
}


# -- one engine -------------------------------------------------------------------------------------------------------


def serve(arguments: dict[str, Any]) -> None:
    """A cell's process: start the engine, then run the workload that each line of the input names."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints goes to the log
    begun = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    report = llm.collective_rpc("fl_report")[0] if "fl_dispatch" in sys.modules else None
    answers.write(json.dumps({"start_s": time.perf_counter() - begun, "report": _essence(report)}) + "\n")
    draw = random.Random(0)
    for line in sys.stdin:
        batch, prompt, new = json.loads(line)
        prompts = [{"prompt_token_ids": draw.choices(range(10, 128_000), k=prompt)} for _ in range(batch)]
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        answers.write(json.dumps(seconds) + "\n")


def _essence(report: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Of a worker's report what says which implementations ran."""
    if report is None:
        return None
    manifest = report["manifest"]
    return {name: report[name] for name in ("layers", "native_layers", "attention", "failed", "compiled")} | {
        "chosen": None if manifest is None else manifest["choices"]
    }


class Engine:
    """A cell's process, from here."""

    def __init__(self, name: str, model: Path, log: Path) -> None:
        self.name, self.log = name, log
        cell = CELLS[name]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_FL_", "VLLM_PLUGINS"))}
        fixed = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        cache = {"VLLM_CACHE_ROOT": str(model / f"cache-{name}"), "TRITON_CACHE_DIR": str(model / f"triton-{name}")}
        arguments = {**COMMON, "model": str(model), **cell.engine}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**kept, **fixed, **cache, **cell.variables},
        )

    def answer(self) -> Any:
        """The next line of its output.

        Raises:
            RuntimeError: it ended.
        """
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}; its log is {self.log}")
        return json.loads(line)

    def run(self, work: Workload) -> float:
        """Seconds for a workload."""
        print(json.dumps([work.batch, work.prompt, work.new]), file=self.process.stdin, flush=True)
        return float(self.answer())

    def late_compilations(self) -> int:
        """How often its log says that a kernel was compiled or tuned after the engine was ready."""
        return self.log.read_text(errors="replace").count(" during inference: ")

    def stop(self) -> None:
        """End it."""
        self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


# -- all of them ------------------------------------------------------------------------------------------------------


def measure(names: Iterable[str], rounds: int, layers: int, folder: Path, logs: Path) -> dict[str, Any]:
    """Start every cell, let them take turns, and return what was measured."""
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
    engines = [Engine(name, folder, logs / f"{name}.log") for name in names]
    started: dict[str, Any] = {}
    for engine in list(engines):
        try:
            started[engine.name] = engine.answer()
            if not CELLS[engine.name].vanilla and started[engine.name]["report"] is None:
                raise RuntimeError(f"{engine.name} runs without the plugin; its log is {engine.log}")
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            engines.remove(engine)
    print("ready:", {name: round(data["start_s"]) for name, data in started.items()}, flush=True)
    rates: dict[str, dict[str, list[float]]] = {work.name: {e.name: [] for e in engines} for work in WORKLOADS}
    for turn in range(-1, rounds):
        for work in WORKLOADS:
            for place in range(len(engines)):
                engine = engines[(place + turn) % len(engines)]
                seconds = engine.run(work)
                if turn >= 0:  # the first round warms up
                    rates[work.name][engine.name].append(work.tokens / seconds)
        print("round", turn, flush=True)
    late = {engine.name: engine.late_compilations() for engine in engines}
    for engine in engines:
        engine.stop()
    return {"rates": rates, "started": started, "late_compilations": late}


def compare(rates: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Workload → cell → median tokens a second, and its ratio to the better vanilla: median, least, largest."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for work, cells in rates.items():
        vanilla = [values for name, values in cells.items() if CELLS[name].vanilla]
        result[work] = {}
        for name, values in cells.items():
            row = {"tokens_per_s": statistics.median(values)}
            if vanilla:
                ratios = [value / max(best) for value, *best in zip(values, *vanilla, strict=True)]
                row |= {"ratio": statistics.median(ratios), "least": min(ratios), "largest": max(ratios)}
            result[work][name] = row
    return result


def table(result: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The comparison as Markdown."""
    lines = ["| workload | cell | tokens/s | of the better vanilla |", "|---|---|---|---|"]
    for work, cells in result.items():
        for name, row in cells.items():
            ratio = f"{row['ratio']:.3f} [{row['least']:.3f}, {row['largest']:.3f}]" if "ratio" in row else ""
            lines.append(f"| {work} | {name} | {row['tokens_per_s']:,.0f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(STANDARD), help=f"of {', '.join(CELLS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="of the model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve))
        return
    import torch

    import vllm

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        found = measure(options.cells.split(","), options.rounds, options.layers, folder, logs)
    found["compared"] = compare(found["rates"])
    found["machine"] = {
        "gpu": torch.cuda.get_device_name(0),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cells": {cell: dict(CELLS[cell].variables) for cell in found["started"]},
        "rounds": options.rounds,
        "layers": options.layers,
    }
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(table(found["compared"]))
    print("compiled after the start:", found["late_compilations"])


if __name__ == "__main__":
    main()
