"""Small sums over two ranks of one machine in one kernel, in which each rank reads the other's part in shared memory.

A decoding step adds some hundred kilobytes twice in each layer. A library's all-reduce takes longer to start than to
move so little. If the devices map each other's memory (PyTorch's symmetric memory, without multicast), the sum is one
Triton kernel (:mod:`one_shot_kernel`). When they connect, the ranks measure up to which size it is faster, in captured
graphs, as in serving. The slowest rank's time counts, so all ranks choose alike.

As with a library, all ranks must make the same sums in the same order, one at a time. A rank that ends leaves the other
one waiting in the kernel, without a time limit, until the host ends it.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...devices import detect_device
from ...devices.triton import why_unserved
from ...logger_manager import get_logger
from ...policy import get_policy
from ...settings import get_settings
from .agreement import gather

logger = get_logger(__name__)

RANKS = 2
"""Number of ranks; more were never tried."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = tuple(1 << power for power in range(13, 24))
"""Bytes that are timed: 8 KiB to 8 MiB. Smaller sums count as the first; the library makes larger ones."""
VECTOR = 8
"""The number of elements of a sum must be a multiple of this."""
CALLS = 20
"""Number of calls in a timed graph."""
REPLAYS = 5
"""Number of timed replays of the graph."""


@dataclass
class OneShotSums:
    """Sums over the ranks of a group through memory that all of them map.

    Args:
        add: writes the sum over the ranks of a tensor that :meth:`takes` into another one, or into the same.
        most: bytes of the largest tensor.
    """

    add: Callable[[Tensor, Tensor], None]
    most: int

    def takes(self, tensor: Tensor) -> bool:
        """Whether a contiguous tensor is summed here; every rank gets the same answer, or the ranks would diverge."""
        elements = tensor.numel()
        return 0 < tensor.nbytes <= self.most and elements % VECTOR == 0 and tensor.dtype in DTYPES


class NotSharedError(Exception):
    """The library makes the sums of a group, on every rank; the message says why."""


def connect(
    group: ProcessGroup, cpu_group: ProcessGroup, device: torch.device, all_reduce: Callable[[Tensor], None]
) -> OneShotSums | None:
    """Return one-shot sums for a group, up to the size from which ``all_reduce`` is faster; ``None`` if it always is.

    Every rank of the group must call it, and all get the same answer. A rank that fails informs the others before they
    go on, and all leave the sums to the library.

    Args:
        group: the ranks, with the library of ``all_reduce``.
        cpu_group: the same ranks, for agreement.
        device: this rank's device.
        all_reduce: overwrites a tensor with the sum over the ranks.
    """
    name = f"'{group.group_name}'"
    try:
        ours, library, sums = _try(group, cpu_group, device, all_reduce)
    except NotSharedError as reason:
        logger.info("sums over group %s are the library's, because %s", name, reason)
        return None
    sums.most = largest_faster(ours, library)
    times = ", ".join(f"{in_words(size)} {a:.1f} | {b:.1f}" for size, a, b in zip(SIZES, ours, library, strict=True))
    upto = f"up to {in_words(sums.most)} in one kernel" if sums.most else "the library's"
    logger.info("sums over group %s are %s; microseconds of one kernel | the library: %s", name, upto, times)
    return sums if sums.most else None


def _try(
    group: ProcessGroup, cpu_group: ProcessGroup, device: torch.device, all_reduce: Callable[[Tensor], None]
) -> tuple[list[float], list[float], OneShotSums]:
    """Return both times of :data:`SIZES`, and the sums.

    Raises:
        NotSharedError: on every rank.
    """
    _agree(_refusal(dist.get_world_size(group)), cpu_group)
    places = gather(cpu_group, _place(device))
    _agree(next(filter(None, (_why_unmappable(device, place) for place in places)), ""), cpu_group)
    shared = _on_all_ranks(cpu_group, lambda: SharedMemory(group, device))
    _on_all_ranks(cpu_group, shared.map_peers)
    _on_all_ranks(cpu_group, shared.warm_up)
    _on_all_ranks(cpu_group, shared.clear)
    ours, library = measure((shared.add_in_place, all_reduce), device, cpu_group)
    return ours, library, OneShotSums(shared.add, SIZES[-1])


def _refusal(ranks: int) -> str:
    """Return why a group is not even tried; empty if it is."""
    if ranks != RANKS:
        return f"{ranks} ranks were never tried"
    if not get_settings().chip_features:
        return "VLLM_FL_CHIP_FEATURES is off"
    if get_policy().batch_invariant:
        return "a kernel for small sums alone is not batch-invariant"
    return why_unserved()


def largest_faster(ours: Sequence[float], library: Sequence[float]) -> int:
    """Return the largest of :data:`SIZES` up to which our times are always lower; 0 if the first is not."""
    most = 0
    for size, mine, other in zip(SIZES, ours, library, strict=True):
        if mine >= other:
            break
        most = size
    return most


# -- agreement --------------------------------------------------------------------------------------------------------


def _agree(reason: str, cpu_group: ProcessGroup) -> None:
    """Raise ``NotSharedError`` if any rank has a reason."""
    if found := next(filter(None, gather(cpu_group, reason)), ""):
        raise NotSharedError(found)


def _on_all_ranks(cpu_group: ProcessGroup, step: Callable[[], Any]) -> Any:
    """Run a step on every rank; raise on all if it failed on one."""
    result, reason = None, ""
    try:
        result = step()
    except Exception as error:  # an error of any type from a compiler or driver; every rank gives it as its reason
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    _agree(reason, cpu_group)
    return result


def _place(device: torch.device) -> tuple[str, str]:
    """Return the machine and the device of this rank, by names that other processes know."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return socket.gethostname(), str(getattr(properties, "uuid", device))


def _why_unmappable(device: torch.device, place: tuple[str, str]) -> str:
    """Return why this rank cannot map the memory of a rank at that place; empty if it can."""
    module, shares = torch.get_device_module(device), detect_device().shares_memory
    host, own = _place(device)
    if place[0] != host:
        return "its ranks are on several machines"
    if place[1] == own:
        return ""
    seen = [str(getattr(module.get_device_properties(index), "uuid", "")) for index in range(module.device_count())]
    if place[1] not in seen:
        return f"device {device} does not see that of another rank"
    other = seen.index(place[1])
    if shares is None or not shares(device.index, other):
        return f"device {device} shares no memory with device {other}"
    return ""


# -- the memory -------------------------------------------------------------------------------------------------------


class SharedMemory:
    """A rank's memory for :mod:`one_shot_kernel`; all ranks take the steps of its setup together."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric  # late import: it registers operators

        from . import one_shot_kernel  # late import: it imports Triton

        self.kernel, self.symmetric, self.group = one_shot_kernel, symmetric, group
        self.place, ranks = SIZES[-1], dist.get_world_size(group)
        size = 2 * self.place + 8 * self.kernel.BLOCKS * ranks
        self.memory: Tensor = symmetric.empty(size, dtype=torch.uint8, device=device)
        self.calls = torch.zeros(self.kernel.BLOCKS, dtype=torch.int64, device=device)

    def map_peers(self) -> None:
        """Map the memories of the other ranks."""
        handle = self.symmetric.rendezvous(self.memory, self.group.group_name)
        self.rank = handle.rank
        self.memories = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self.memory.device)
        self.clear()

    def warm_up(self) -> None:
        """Compile the kernel for each type, in calls that do not wait for the other rank."""
        for dtype in DTYPES:
            self.calls.fill_(self.kernel.NO_WAIT)
            self.add_in_place(torch.zeros(VECTOR, dtype=dtype, device=self.memory.device))
            torch.get_device_module(self.memory.device).synchronize(self.memory.device)

    def clear(self) -> None:
        """Reset the memory for the first call."""
        self.memory.zero_()
        self.calls.zero_()
        torch.get_device_module(self.memory.device).synchronize(self.memory.device)

    def add(self, tensor: Tensor, out: Tensor) -> None:
        """Write the sum of a tensor over the ranks into ``out``, which may be the tensor."""
        self.kernel.add(tensor, out, self.memories, self.calls, self.place, self.rank)

    def add_in_place(self, tensor: Tensor) -> None:
        """Overwrite a tensor with the sum over the ranks."""
        self.add(tensor, tensor)


def measure(
    calls: Sequence[Callable[[Tensor], None]], device: torch.device, cpu_group: ProcessGroup
) -> list[list[float]]:
    """Return microseconds of a call for each of :data:`SIZES`, on the slowest rank."""
    tensors = [torch.zeros(size // 2, dtype=torch.bfloat16, device=device) for size in SIZES]
    times = torch.tensor([[_time(call, tensor) for tensor in tensors] for call in calls], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=cpu_group)
    found: list[list[float]] = times.tolist()
    return found


def _time(call: Callable[[Tensor], None], tensor: Tensor) -> float:
    """Return microseconds of a call in a captured graph, the median of its replays."""
    module = torch.get_device_module(tensor.device)
    call(tensor)  # its setup cannot be captured
    module.synchronize()
    graph = module.CUDAGraph()
    with module.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call(tensor)
    replays: list[float] = []
    for _ in range(REPLAYS + 1):  # the first one uploads the graph
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        replays.append(1000 * start.elapsed_time(end) / CALLS)
    return statistics.median(replays[1:])


def in_words(size: int) -> str:
    """Return bytes as text for people."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
