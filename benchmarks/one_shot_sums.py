"""Sums over two GPUs of one machine: ``fl_dispatch.hosting.ranks.one_shot`` beside NCCL, in captured graphs.

Two processes, one per GPU, add bfloat16 tensors. A time is the slower rank's median over replays of a graph with 20
sums. Engines measure and log the same for their tensor-parallel group when they start.

    python benchmarks/one_shot_sums.py [--json FILE]

Needs two GPUs of one machine that can read each other's memory, and this package.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fl_dispatch.cli.output import print_table
from fl_dispatch.evidence.origin import write
from fl_dispatch.hosting.ranks import one_shot
from fl_dispatch.hosting.ranks.collectives import TorchCollectives

RANKS = 2


def measure(rank: int, meeting_point: str) -> list[list[float]]:
    """Return microseconds of the kernel and of NCCL for each size."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=meeting_point, rank=rank, world_size=RANKS)
    ranks = list(range(RANKS))
    group, cpu_group = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
    device = torch.device("cuda", rank)
    library = TorchCollectives(group, ranks)
    shared = one_shot.SharedMemory(group, device)
    shared.map_peers()
    dist.barrier(group=cpu_group)  # all memory must be ready before the first sum
    return one_shot.measure((shared.add_in_place, library.all_reduce), device, cpu_group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if torch.cuda.device_count() < RANKS:
        parser.error(f"this machine has {torch.cuda.device_count()} GPUs, and {RANKS} are needed")
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{folder}/meet"
        if (child := os.fork()) == 0:  # before this process has a CUDA context
            measure(1, meeting_point)
            os._exit(0)
        ours, library = measure(0, meeting_point)
        os.waitpid(child, 0)
    rows = [
        [one_shot.in_words(size), f"{mine:.1f}", f"{other:.1f}", f"{mine / other:.2f}"]
        for size, mine, other in zip(one_shot.SIZES, ours, library, strict=True)
    ]
    title = f"Sums over {RANKS} x {torch.cuda.get_device_name(0)}"
    print_table(title, ["size", "one kernel, us", "NCCL, us", "ratio"], rows)
    if options.json:
        found: dict[str, Any] = {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "bytes": list(one_shot.SIZES),
            "one kernel, us": ours,
            "NCCL, us": library,
        }
        write(options.json, found)


if __name__ == "__main__":
    main()
