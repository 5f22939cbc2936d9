"""Two ranks that exchange tensors, once for each library: ``python communicate.py FOLDER NAME=FLAGCX_PATH …``.

Each writes what it got to ``FOLDER/NAME-rank.json``. An empty path means ``torch.distributed``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fl_dispatch import reset_global_policy
from vllm_fl.distributed import CommunicatorFL, report

RANKS = 2


def exchange(rank: int) -> dict[str, Any]:
    """One call of each kind; every rank's tensors differ, and so do the sizes of its parts."""
    group = dist.new_group(list(range(RANKS)), backend="gloo")
    communicator = CommunicatorFL(group, torch.device("cpu"), group, "tp:0")
    mine = torch.arange(6.0).reshape(2, 3) + 10 * rank
    part = torch.full((1 + 2 * rank, 2), float(rank + 1))
    both = torch.arange(8.0).reshape(4, 2) * (rank + 1)
    got = {
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
    library = type(communicator.collectives).__name__
    values = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in got.items()}
    return {**values, "library": library, "calls": calls}


def main(folder: Path, libraries: dict[str, str]) -> None:
    for name, path in libraries.items():
        os.environ["FLAGCX_PATH"] = path
        children = []
        for rank in range(RANKS):
            if (child := os.fork()) == 0:
                reset_global_policy()  # reads the settings again
                dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=RANKS)
                (folder / f"{name}-{rank}.json").write_text(json.dumps(exchange(rank)))
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"the ranks over {name} ended with {codes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict(argument.split("=", 1) for argument in sys.argv[2:]))
