"""Two ranks with a GPU each add tensors in one kernel and by NCCL, eagerly and from a graph; see ``two_ranks``."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

import two_ranks
from fl_dispatch.hosting.collectives import TorchCollectives, connect
from fl_dispatch.hosting.one_shot import DTYPES

ELEMENTS = (8, 4096, 5 * 4096, 32 * 4096 + 8)
TIMES = 50


def tensor_of(rank: int, dtype: torch.dtype, elements: int, turn: int) -> torch.Tensor:
    """A rank's part in a turn; whole numbers, so that the sum is exact."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-100, 100, (elements,), generator=generator).to(dtype)


def wrong(sums: Any, rank: int, dtype: torch.dtype, elements: int, graph: bool) -> int:
    """Turns out of :data:`TIMES` with a wrong sum."""
    tensor = torch.zeros(elements, dtype=dtype, device="cuda")
    sums.add(tensor)
    captured = torch.cuda.CUDAGraph()
    if graph:
        torch.cuda.synchronize()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            sums.add(tensor)
    results = []
    for turn in range(TIMES):  # without a wait in between: the ranks run apart
        tensor.copy_(tensor_of(rank, dtype, elements, turn).cuda())
        captured.replay() if graph else sums.add(tensor)
        results.append(tensor.clone())
    right = (sum(tensor_of(other, dtype, elements, turn) for other in range(2)) for turn in range(TIMES))
    return sum(not torch.equal(found.cpu(), expected) for found, expected in zip(results, right, strict=True))


def exchange(_: str, rank: int, meeting_point: str) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=meeting_point, rank=rank, world_size=two_ranks.RANKS)
    ranks = list(range(two_ranks.RANKS))
    device_group, cpu_group = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
    device = torch.device("cuda", rank)
    collectives = connect(device_group, cpu_group, ranks, device, adds_in_layers=True)
    assert isinstance(collectives, TorchCollectives)
    sums = collectives.sums
    assert sums is not None
    cases = itertools.product(DTYPES, ELEMENTS, (False, True))
    found = {"most": sums.most, "wrong": [wrong(sums, rank, *case) for case in cases]}
    other = connect(device_group, cpu_group, ranks, device)
    return {**found, "elsewhere": other.sums is not None}  # type: ignore[attr-defined]


if __name__ == "__main__":
    two_ranks.main(exchange)
