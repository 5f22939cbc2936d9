"""FlagGems' matrix product against PyTorch's, for the products of Llama-3.1-8B: device time in graphs of ten calls.

    python benchmarks/flaggems_mm.py [--rows 1 8 256] [--json FILE]

Needs an NVIDIA GPU and FlagGems. FlagGems first tunes itself for every size, which takes seconds each, or minutes if
its kernels are not in Triton's cache yet; results are kept in ``~/.flaggems``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import flag_gems
import torch
import triton

from fl_dispatch.evidence.origin import write

WEIGHTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Product → columns and inner size of its weight."""
CALLS, ROUNDS = 10, 5


def microseconds(call: Callable[[], object]) -> float:
    """Return the device time of a call."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(ROUNDS):
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 256, 8192])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    with torch.inference_mode():
        for rows in options.rows:
            for name, (columns, inner) in WEIGHTS.items():
                weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
                x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
                flag_gems.mm(x, weight.T)  # FlagGems tunes itself
                ours, theirs = (microseconds(partial(f, x, weight.T)) for f in (flag_gems.mm, torch.mm))
                found.append({"rows": rows, "product": name, "flaggems_us": ours, "torch_us": theirs})
                print(f"{rows:5} rows, {name:8} FlagGems {ours:8.1f} us, PyTorch {theirs:8.1f} us", flush=True)
    machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__}
    if options.json:
        machine["flag_gems"] = flag_gems.__version__
        write(options.json, {"machine": machine, "products": found})


if __name__ == "__main__":
    main()
