"""One of two ranks: it exchanges through a :class:`Communicator`, and compares its choices with the other one's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import two_ranks
from fl_dispatch import (
    BackendImplKind,
    OpImpl,
    RankDivergenceError,
    freeze_dispatch,
    get_default_manager,
    reset_global_policy,
    thaw_dispatch,
)
from fl_dispatch.hosting.ranks import agreement
from fl_dispatch.hosting.ranks.collectives import Communicator, connect, report
from fl_dispatch.settings import get_settings, install_settings

SIZES = (None, [2, 2], [1, 3], [4, 0])
SHAPE = [4, 4, 2]


def tensor_of(rank: int) -> Tensor:
    """The tensor ``[4, 4, 2]`` of a rank; whole numbers, so that sums are exact."""
    return torch.arange(32.0).reshape(SHAPE) * (rank + 1) + 7 * rank


def gathers(communicator: Communicator, rank: int) -> list[dict[str, Any]]:
    """Each dimension, with each sizes, into nothing, a contiguous and a strided output."""
    results = []
    for dim in (0, 1, -3, -2):
        for sizes in SIZES:
            size = 4 if sizes is None else sizes[rank]
            part = tensor_of(rank).narrow(dim, 0, size)
            whole = communicator.all_gather(part, dim, sizes)
            contiguous, strided = torch.empty(whole.shape), torch.empty(whole.shape[::-1]).permute(2, 1, 0)
            outputs = [communicator.all_gather(part, dim, sizes, output) for output in (contiguous, strided)]
            assert outputs[0] is contiguous
            assert outputs[1] is strided
            results.append({"dim": dim, "sizes": sizes, "results": [whole, *outputs]})
    return results


def scatters(communicator: Communicator, rank: int) -> list[dict[str, Any]]:
    """The same for sums that are divided."""
    results = []
    for dim in (0, 1, -3, -2):
        for sizes in SIZES:
            part = communicator.reduce_scatter(tensor_of(rank), dim, sizes)
            contiguous, strided = torch.empty(part.shape), torch.empty(part.shape[::-1]).permute(2, 1, 0)
            outputs = [communicator.reduce_scatter(tensor_of(rank), dim, sizes, to) for to in (contiguous, strided)]
            assert outputs[0] is contiguous
            assert outputs[1] is strided
            results.append({"dim": dim, "sizes": sizes, "results": [part, *outputs]})
    return results


def refusals(communicator: Communicator) -> list[str]:
    """The message of each impossible call; nothing is exchanged."""
    tensor = torch.zeros(3, 2)
    calls: list[Callable[[], Tensor]] = [
        lambda: communicator.reduce_scatter(tensor),
        lambda: communicator.reduce_scatter(tensor, 0, [1, 1]),
        lambda: communicator.reduce_scatter(tensor, 0, [3]),
        lambda: communicator.all_gather(tensor, 0, [2, 2]),
        lambda: communicator.all_gather(tensor, 0, None, torch.zeros(3, 2)),
    ]
    said = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said


def silu_and_mul(x: Tensor) -> Tensor:
    """An implementation that only one rank has."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def compare(group: dist.ProcessGroup) -> dict[str, str]:
    """The errors about the other rank's choices, and then about its manifest."""
    checks: dict[str, Callable[[], None]] = {
        "choices": lambda: agreement.refuse_divergence(group, group),
        "manifests": lambda: agreement.refuse_other_manifest(freeze_dispatch(), group),
    }
    heard = {}
    for name, check in checks.items():
        try:
            check()
        except RankDivergenceError as error:
            heard[name] = str(error)
    thaw_dispatch()
    return heard


def exchange(_: str, rank: int, meeting_point: str) -> dict[str, Any]:
    """Everything, once."""
    reset_global_policy()  # reads the settings again
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=two_ranks.RANKS)
    group = dist.new_group(list(range(two_ranks.RANKS)), backend="gloo")
    collectives = connect(group, group, list(range(two_ranks.RANKS)), "cpu")
    communicator = Communicator("all", collectives, rank, two_ranks.RANKS)
    strided = tensor_of(rank)[:, ::2]
    communicator.broadcast(strided, 1)
    got: dict[str, Any] = {
        "gathers": gathers(communicator, rank),
        "scatters": scatters(communicator, rank),
        "refusals": refusals(communicator),
        "broadcast": strided,
        "sum": communicator.all_reduce(tensor_of(rank).transpose(0, 2)),
    }
    if rank == 0:
        communicator.send(tensor_of(0).transpose(0, 1), 1)
    else:
        got["received"] = communicator.receive(SHAPE, torch.float32, torch.device("cpu"), 0)
    got["calls"] = report()
    communicator.close()
    get_default_manager().ensure_initialized()
    alike = compare(group)
    if rank == 1:
        uneven = OpImpl("silu_and_mul", "vendor.uneven", BackendImplKind.VENDOR, silu_and_mul, vendor="uneven")
        get_default_manager().registry.register_impl(uneven)
    different = compare(group)
    if rank == 1:
        install_settings(replace(get_settings(), platform_file=None))
    else:
        install_settings(replace(get_settings(), platform_file="/there/chip.yaml (0123456789abcdef)"))
    lacking = compare(group)["choices"]
    library = type(collectives).__name__
    everywhere = [agreement.everywhere(group, holds) for holds in (True, rank == 0, rank == 1, False)]
    heard = {"alike": alike, "different": different, "lacking": lacking, "everywhere": everywhere}
    return {**got, "library": library, **heard}


if __name__ == "__main__":
    two_ranks.main(exchange)
