"""Two ranks with a GPU each add tensors in one kernel and by NCCL, eagerly and from a graph; see ``two_ranks``."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import two_ranks
from fl_dispatch.hosting.ranks import one_shot
from fl_dispatch.hosting.ranks.collectives import Communicator, connect, connect_sums
from fl_dispatch.hosting.ranks.one_shot import DTYPES, SIZES, largest_faster
from fl_dispatch.hosting.ranks.one_shot_kernel import BLOCKS, TILE

ELEMENTS = (8, 4096, 5 * 4096, BLOCKS * TILE + 8, SIZES[-1] // 4)
"""The last two take several turns of the kernel's programs."""
TIMES = 50


def tensor_of(rank: int, dtype: torch.dtype, elements: int, turn: int) -> torch.Tensor:
    """A rank's part in a turn; whole numbers, so that the sum is exact."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-100, 100, (elements,), generator=generator).to(dtype)


def wrong(communicator: Communicator, rank: int, graph: bool) -> list[str]:
    """Cases with a wrong sum: all types and lengths in turn, without a wait in between, so that the ranks run apart."""
    cases = list(itertools.product(range(3), ELEMENTS, DTYPES))
    tensors = [torch.zeros(elements, dtype=dtype, device="cuda") for _, elements, dtype in cases]
    parts = [tensor_of(rank, dtype, elements, turn).cuda() for turn, elements, dtype in cases]
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local") if graph else contextlib.nullcontext():
        for tensor, part in zip(tensors, parts, strict=True):
            communicator.all_reduce(part, tensor)
    for _ in range(TIMES if graph else 0):
        captured.replay()
    found = []
    for tensor, (turn, elements, dtype) in zip(tensors, cases, strict=True):
        right = sum(tensor_of(other, dtype, elements, turn).float() for other in range(two_ranks.RANKS))
        if not torch.equal(tensor.float().cpu(), right):
            found.append(f"{dtype} {elements}")
    return found


def exchange(_: str, rank: int, meeting_point: str) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=meeting_point, rank=rank, world_size=two_ranks.RANKS)
    ranks = list(range(two_ranks.RANKS))
    device_group, cpu_group = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
    library = connect(device_group, cpu_group, ranks, "cuda")
    chosen: list[int] = []

    def take_all(ours: Sequence[float], others: Sequence[float]) -> int:
        chosen.append(largest_faster(ours, others))
        return SIZES[-1]  # a size that is the library's because that is faster must be right too

    one_shot.largest_faster = take_all
    sums = connect_sums(device_group, cpu_group, torch.device("cuda", rank), library)
    communicator = Communicator("tp", library, rank, two_ranks.RANKS, sums)
    found = wrong(communicator, rank, False) + wrong(communicator, rank, True)
    return {"chosen": chosen, "wrong": found, "calls": communicator.calls}


if __name__ == "__main__":
    two_ranks.main(exchange)
