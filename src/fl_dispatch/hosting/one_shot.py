"""Small sums over the ranks of one machine in one kernel: each rank reads what the others have put into shared memory.

A decoding step adds up some hundred kilobytes twice in each layer. A library's all-reduce takes longer to begin than to
move so little. The sum is one Triton kernel (:mod:`one_shot_kernel`) if the devices of a group map each other's memory,
by PyTorch's symmetric memory; it needs no multicast. The size up to which it is faster is measured when the ranks
connect, in captured graphs, as it will run. The slowest rank's time counts, so all ranks choose alike.

As with a library, all ranks make the same sums in the same order and one at a time, and a rank that ends leaves the
others waiting in the kernel; the host ends them.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..logger_manager import get_logger

logger = get_logger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = tuple(1 << power for power in range(13, 24))
"""Bytes that are timed: 8 KiB to 8 MiB. Smaller sums count as the first, larger ones are the library's."""
VECTOR = 8
"""Elements of which a sum must have a multiple."""
CALLS, REPLAYS = 20, 5
"""Calls in a timed graph, and how often it is replayed."""


class OneShotSums:
    """Sums over the ranks of a group through memory that all of them map.

    Args:
        add: overwrites a tensor that :meth:`takes` with the sum over the ranks.
        most: bytes of the largest tensor.
    """

    def __init__(self, add: Callable[[Tensor], None], most: int) -> None:
        self.add, self.most = add, most

    def takes(self, tensor: Tensor) -> bool:
        """Whether a contiguous tensor is summed here."""
        elements = tensor.numel()
        return 0 < elements * tensor.itemsize <= self.most and elements % VECTOR == 0 and tensor.dtype in DTYPES


def connect(
    group: ProcessGroup, cpu_group: ProcessGroup, device: torch.device, all_reduce: Callable[[Tensor], None]
) -> OneShotSums | None:
    """One-shot sums for a group, up to the size from which ``all_reduce`` is faster; ``None`` if it always is.

    Every rank of the group must call it, and all of them get the same answer.

    Args:
        group: the ranks, and the library that ``all_reduce`` stands for.
        cpu_group: the same ranks, to agree over.
        device: this rank's.
        all_reduce: overwrites a tensor with the sum over the ranks.
    """
    name = f"'{group.group_name}'"
    reasons = [_why_not(device, place) for place in _gathered(_place(device), cpu_group)]
    if reason := next(filter(None, _gathered(next(filter(None, reasons), ""), cpu_group)), ""):
        logger.info("sums over group %s are the library's, because %s", name, reason)
        return None
    sums, error = None, ""
    try:
        sums = OneShotSums(adder(group, device), SIZES[-1])
    except RuntimeError as failure:  # what PyTorch raises where the driver maps no memory of another device
        error = str(failure).strip().partition("\n")[0]
    if reason := next(filter(None, _gathered(error, cpu_group)), ""):  # nobody adds before all memory is ready
        logger.info("sums over group %s are the library's, because no memory can be shared: %s", name, reason)
        return None
    assert sums is not None
    ours, library = measure((sums.add, all_reduce), device, cpu_group)
    sums.most = largest_faster(ours, library)
    times = ", ".join(f"{in_words(size)} {a:.1f} | {b:.1f}" for size, a, b in zip(SIZES, ours, library, strict=True))
    upto = f"up to {in_words(sums.most)} in one kernel" if sums.most else "the library's"
    logger.info("sums over group %s are %s; microseconds of one kernel | the library: %s", name, upto, times)
    return sums if sums.most else None


def largest_faster(ours: Sequence[float], library: Sequence[float]) -> int:
    """The largest of :data:`SIZES` up to which our times are the lower ones throughout; 0 if the first is not."""
    most = 0
    for size, mine, other in zip(SIZES, ours, library, strict=True):
        if mine >= other:
            break
        most = size
    return most


def _gathered(value: Any, cpu_group: ProcessGroup) -> list[Any]:
    """Every rank's value, in the order of the ranks."""
    values: list[Any] = [None] * dist.get_world_size(cpu_group)
    dist.all_gather_object(values, value, group=cpu_group)
    return values


def _place(device: torch.device) -> tuple[str, str]:
    """The machine and the device of this rank, by names that other processes know them by."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return socket.gethostname(), str(getattr(properties, "uuid", device))


def _why_not(device: torch.device, place: tuple[str, str]) -> str:
    """Why this rank cannot map the memory of a rank at that place, or an empty text."""
    module = torch.get_device_module(device)
    host, own = _place(device)
    if place[0] != host:
        return "its ranks are on several machines"
    seen = [str(getattr(module.get_device_properties(index), "uuid", "")) for index in range(module.device_count())]
    if place[1] != own and place[1] in seen and not module.can_device_access_peer(device, seen.index(place[1])):
        return f"device {device} cannot read the memory of device {seen.index(place[1])}"
    return ""


def adder(group: ProcessGroup, device: torch.device) -> Callable[[Tensor], None]:
    """The sum through memory of this rank's, after every rank has mapped that of the others."""
    from torch.distributed import _symmetric_memory as symmetric  # late: it registers operators

    from . import one_shot_kernel as kernel  # late: it imports Triton

    ranks, place = dist.get_world_size(group), SIZES[-1]
    memory: Tensor = symmetric.empty(2 * place + 8 * kernel.BLOCKS * ranks, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, group.group_name)
    memory.zero_()
    calls = torch.zeros(kernel.BLOCKS, dtype=torch.int64, device=device)
    memories = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    torch.get_device_module(device).synchronize(device)

    def add(tensor: Tensor, kept: Tensor = memory) -> None:
        kernel.add(tensor, memories, calls, place, handle.rank)

    return add


def measure(
    calls: Sequence[Callable[[Tensor], None]], device: torch.device, cpu_group: ProcessGroup
) -> list[list[float]]:
    """Microseconds of each call for each of :data:`SIZES`, those of the slowest rank."""
    tensors = [torch.zeros(size // 2, dtype=torch.bfloat16, device=device) for size in SIZES]
    times = torch.tensor([[_time(call, tensor) for tensor in tensors] for call in calls], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=cpu_group)
    found: list[list[float]] = times.tolist()
    return found


def _time(call: Callable[[Tensor], None], tensor: Tensor) -> float:
    """Microseconds of a call in a captured graph, the median of its replays."""
    module = torch.get_device_module(tensor.device)
    call(tensor)  # what it sets up cannot be captured
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
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
