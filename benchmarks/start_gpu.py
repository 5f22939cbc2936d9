"""Seconds until vLLM is ready on a GPU, with and without the plugin, one engine at a time.

Each cell of ``serve_vllm.py`` (``--cells``) is a separate process with its own cache folders of vLLM, Triton and
Inductor. They are empty at the first start of a cell; later starts use the caches of the earlier ones. The time is from
the start of the process, including imports, until ``LLM`` has answered one request. Cells alternate, and before the
first start each cell's imports run once, so that no cell pays for a cold disk.

    python benchmarks/start_gpu.py [--cells vanilla_fa3,plugin_shipped] [--starts 3] [--layers 32] [--json FILE]
        [--logs FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from serve_vllm import VANILLA, WORKLOADS, Engine, cached_tokens, cells_of
from shapes import SHAPES

FIRST = WORKLOADS[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--cells", type=lambda text: text.split(","), default=["vanilla_fa3", "plugin_shipped"])
    parser.add_argument("--starts", type=int, default=3, help="of each cell; the first one is cold")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    layers = given.layers or shape.layers
    known = cells_of(shape)
    if unknown := set(given.cells) - set(known):
        parser.error(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    machine = {"gpu": torch.cuda.get_device_name(0), "vllm": version("vllm"), "torch": torch.__version__}
    seconds: dict[str, list[float]] = {name: [] for name in given.cells}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({**shape.config, "num_hidden_layers": layers}))
        cache = shape.cache_bytes(layers, cached_tokens([FIRST]))
        sizes = {"kv_cache_memory_bytes": cache, "max_model_len": FIRST.prompt + FIRST.new}
        for plugins in ("", None):
            kept = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
            variables = kept if plugins is None else {**kept, "VLLM_PLUGINS": plugins}
            load = "import vllm.plugins, vllm.v1.engine.core; vllm.plugins.load_general_plugins()"
            subprocess.run([sys.executable, "-c", load], env=variables, check=True, stdout=subprocess.DEVNULL)
        for turn in range(given.starts):
            logs = (given.logs or folder) / f"start-{turn}"
            logs.mkdir(parents=True, exist_ok=True)
            for cell in given.cells:
                begun = time.perf_counter()
                engine = Engine(cell, known[cell], folder, sizes, bool(shape.experts), logs, False, 1)
                ready = engine.child.answer()
                if not cell.startswith(VANILLA) and ready["report"] is None:
                    raise SystemExit(f"{cell} runs without the plugin; its log is {engine.log}")
                engine.run(FIRST, 1)
                seconds[cell].append(time.perf_counter() - begun)
                engine.child.stop()
                print(f"{cell}, start {turn}: {seconds[cell][-1]:.1f} s", flush=True)
                if given.json:
                    found = {"machine": machine, "shape": given.shape, "layers": layers, "seconds": seconds}
                    from fl_dispatch.evidence.origin import write  # late: engines import this file too

                    write(given.json, found)
    print("| cell | cold | warm, median |\n|---|---|---|")
    for cell, values in seconds.items():
        warm = f"{statistics.median(values[1:]):.1f}" if values[1:] else ""
        print(f"| {cell} | {values[0]:.1f} | {warm} |")


if __name__ == "__main__":
    main()
