"""One of two ranks, which exchanges through vLLM's communicator; see ``two_ranks``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed import parallel_state

import two_ranks
from fl_dispatch import reset_global_policy
from fl_dispatch.hosting.ranks.collectives import report
from vllm_fl.worker.communicator import CommunicatorFL

RANKS = two_ranks.RANKS


class Group:
    """What vLLM's operator asks of a group of ranks."""

    def __init__(self, communicator: CommunicatorFL) -> None:
        self.unique_name, self._all_reduce_out_place = communicator.unique_name, communicator.all_reduce


def compiled(communicator: CommunicatorFL, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product of a sum over the ranks with itself, and the sum plus 1, from Inductor's code around vLLM's
    operator."""
    group = Group(communicator)
    parallel_state._register_group(group)

    @torch.compile(fullgraph=True)
    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.ops.vllm.all_reduce(2 * x, group_name=group.unique_name)
        return total @ total, total + 1  # the product may take the memory of 2 * x, which nobody reads any more

    return layer(x)


def exchange(_: str, rank: int, meeting_point: str) -> dict[str, Any]:
    """One call of each kind; every rank's tensors differ, and so do the sizes of its parts."""
    reset_global_policy()  # reads the settings again
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=RANKS)
    group = dist.new_group(list(range(RANKS)), backend="gloo")
    communicator = CommunicatorFL(group, torch.device("cpu"), group, "tp:0")
    mine = torch.arange(6.0).reshape(2, 3) + 10 * rank
    part = torch.full((1 + 2 * rank, 2), float(rank + 1))
    both = torch.arange(8.0).reshape(4, 2) * (rank + 1)
    got: dict[str, Any] = {
        "all_reduce": communicator.all_reduce(mine.clone()),
        "all_reduce_strided": communicator.all_reduce(mine.t()),
        "all_gather_last": communicator.all_gather(mine),
        "all_gather_first": communicator.all_gather(mine, 0),
        "all_gatherv": communicator.all_gatherv(part, 0, [1, 3]),
        "all_gatherv_empty": communicator.all_gatherv(part[: 2 * rank], 0, [0, 2]),
        "all_gatherv_list": torch.cat(communicator.all_gatherv([part, 2 * part], 0, [1, 3]), 1),
        "reduce_scatter": communicator.reduce_scatter(both, 0),
        "reduce_scatter_last": communicator.reduce_scatter(both, -1),
        "reduce_scatterv": communicator.reduce_scatterv(both, 0, [1, 3]),
        "reduce_scatterv_empty": communicator.reduce_scatterv(both, 0, [0, 4]),
        "broadcast": communicator.broadcast(mine.clone(), 1),
    }
    got["compiled"] = compiled(communicator, torch.full((4, 4), 1.0 + rank))
    if rank == 0:
        communicator.send(mine)
    else:
        got["recv"] = communicator.recv(mine.shape, mine.dtype)
    try:
        communicator.reduce_scatter(mine[:1], 0)
    except ValueError as error:
        got["error"] = str(error)
    calls = report()
    communicator.destroy()
    return {**got, "library": type(communicator.communicator.collectives).__name__, "calls": calls}


if __name__ == "__main__":
    two_ranks.main(exchange)
