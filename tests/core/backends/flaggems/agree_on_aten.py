"""Two ranks, on one of which FlagGems is wrong, and the ATen operators that they replace once learning has ended."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flaggems_standin
import two_ranks
from fl_dispatch import RankDivergenceError, freeze_dispatch, thaw_dispatch
from fl_dispatch.aten_replacement import register_replacement
from fl_dispatch.backends.flaggems import library
from fl_dispatch.backends.flaggems.aten import replacement
from fl_dispatch.devices import CPU
from fl_dispatch.hosting.ranks.agreement import agree_on_replaced_operators, refuse_other_manifest
from fl_dispatch.settings import Settings

CHIP = dataclasses.replace(CPU, name="chip", torch_type="chip", triton=True)


def add(a: Tensor, b: Tensor | float, *, alpha: float = 1) -> Tensor:
    """Takes no tensor of one dimension."""
    if a.dim() == 1:
        raise ValueError("one dimension")
    return a - (-b)


def wrong(*_: Any) -> Tensor:
    """A product that is wrong."""
    return torch.zeros(3, 5)


def replace(rank: int, refused: frozenset[str]) -> None:
    """Replace everything but some, with ``mm`` wrong on rank 1 and ``add`` wanting on rank 0, and call both."""
    kept = [(key, fn) for key, fn in flaggems_standin.CONFIG if key not in ("mm", "add.Tensor")]
    products = flaggems_standin.mm if rank == 0 else wrong
    vars(flaggems_standin)["CONFIG"] = (("mm", products), ("add.Tensor", add), *kept)
    sys.modules.update(flaggems_standin.modules())
    library.why_missing = lambda: ""  # type: ignore[assignment]
    library.gems.cache_clear()
    assert replacement.replace(Settings.of(flagos_blacklist=refused), CHIP) == ""
    torch.mm(torch.randn(3, 4), torch.randn(4, 5))
    if rank == 0:
        torch.add(torch.ones(3), 1)


def agreement(group: dist.ProcessGroup) -> dict[str, Any]:
    """The operators that this rank replaces and leaves, and whether its manifest is that of the other one."""
    agree_on_replaced_operators(group)
    manifest = freeze_dispatch()
    try:
        refuse_other_manifest(manifest, group)
        heard = ""
    except RankDivergenceError as error:
        heard = str(error)
    thaw_dispatch()
    found = replacement.report()
    return {"aten": manifest.aten, "heard": heard, "wrong": found["wrong"], "replaced": found["replaced"]}


def agree(_: str, rank: int, meeting_point: str) -> Mapping[str, Any]:
    """Everything, once."""
    register_replacement(replacement)
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=two_ranks.RANKS)
    group = dist.new_group(list(range(two_ranks.RANKS)), backend="gloo")
    replace(rank, frozenset())
    both = agreement(group)
    again = agreement(group)
    replacement.remove()
    if rank == 0:
        replace(rank, frozenset())
    nothing_there = agreement(group)
    return {"both": both, "again": again, "nothing there": nothing_there}


if __name__ == "__main__":
    two_ranks.main(agree)
