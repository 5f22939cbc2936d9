"""Two ranks on two emulated NPUs: ``python two_ranks_of_npus.py FOLDER`` writes what each received as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

RANKS = 2


def exchange(rank: int) -> dict[str, Any]:
    """Each collective that vLLM and SGLang use, on tensors of this rank's device."""
    mine = torch.full((3,), float(rank + 1), device=f"npu:{rank}")
    got: dict[str, Any] = {}

    def keep(name: str, *tensors: torch.Tensor) -> None:
        assert all(tensor.device == mine.device for tensor in tensors)
        got[name] = torch.cat([tensor.flatten() for tensor in tensors]).tolist()

    total = mine.clone()
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    keep("all_reduce", total)
    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    keep("all_reduce_max", largest)
    gathered = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(gathered, mine)
    keep("all_gather", *gathered)
    flat = torch.empty(6, device=mine.device)
    dist.all_gather_into_tensor(flat, mine)
    keep("all_gather_into_tensor", flat)
    part = torch.empty(2, device=mine.device)
    dist.reduce_scatter_tensor(part, torch.arange(4.0, device=mine.device) * (rank + 1))
    keep("reduce_scatter_tensor", part)
    sent = mine.clone()
    dist.broadcast(sent, src=1)
    keep("broadcast", sent)
    parts = torch.empty(2, device=mine.device)
    dist.all_to_all_single(parts, torch.tensor([10.0, 20.0], device=mine.device) + rank)
    keep("all_to_all_single", parts)
    reduced = mine.clone()
    dist.reduce(reduced, dst=0)
    keep("reduce", reduced)
    rows = [torch.empty_like(mine) for _ in range(RANKS)] if rank == 0 else None
    dist.gather(mine, rows, dst=0)
    keep("gather", *(rows or []), mine[:0])
    passed = torch.empty_like(mine)
    operations = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, passed, 1 - rank)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    keep("batch_isend_irecv", passed)
    if rank == 0:
        dist.send(mine * 5, 1)
    else:
        dist.recv(passed, 0)
        keep("recv", passed)
    view = torch.zeros(2, 3, device=mine.device)
    dist.all_reduce(view[1].add_(1))
    keep("all_reduce_of_a_view", view)
    functional = torch.ops._c10d_functional.all_reduce(mine, "sum", dist.group.WORLD.group_name)
    keep("functional", torch.ops._c10d_functional.wait_tensor(functional))
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank})
    got["all_gather_object"] = objects
    said = [f"of {rank}"]
    dist.broadcast_object_list(said, src=1)
    got["broadcast_object_list"] = said
    dist.barrier()
    alone = dist.new_group([rank], backend="hccl", use_local_synchronization=True)
    single = mine.clone()
    dist.all_reduce(single, group=alone)
    keep("group_of_one", single)
    on_cpu = torch.ones(2)
    dist.all_reduce(on_cpu, group=dist.new_group([0, 1], backend="gloo"))
    got["gloo_on_the_cpu"] = on_cpu.tolist()
    return got


def work(rank: int, folder: str) -> None:
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    Path(folder, f"{rank}.json").write_text(json.dumps(exchange(rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["EMU_NPUS"] = str(RANKS)
    spawn(work, (sys.argv[1],), nprocs=RANKS)
