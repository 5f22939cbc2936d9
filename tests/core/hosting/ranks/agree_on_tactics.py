"""Two ranks that find other configurations of a Triton kernel fastest, and what they run before and after they agree.

Kernels write their block size, so the results say which configuration ran. Times are planted, and each is counted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import KernelInterface

import two_ranks
from fl_dispatch import freeze_dispatch, get_default_manager
from fl_dispatch.hosting.ranks.agreement import agree_on_tactics
from fl_dispatch.hosting.start import tactics

BLOCKS = (16, 32, 64)
SLOWEST = 9.0
FASTEST = {"first": (64, 32), "later": (32, 16), "unsealed": (64, 32)}
"""Name of a start → the block size that is fastest on each rank."""
timed: list[float] = []
planted: list[float] = []


def bench(call: Any, **_: Any) -> list[float]:
    """The next planted time."""
    call()
    timed.append(planted[len(timed) % len(planted)])
    return [timed[-1]] * 3


def write_block(out: Any, elements: Any, BLOCK: tl.constexpr) -> None:  # noqa: N803
    places = tl.arange(0, BLOCK)
    tl.store(out + places, tl.full((BLOCK,), BLOCK, tl.int32), mask=places < elements)


class Small(KernelInterface[Any]):
    """A kernel of which a device does not take the first configuration, and what was launched."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.arg_names, self.launched = fn, fn.arg_names, list[int]()

    def run(self, *args: Any, warmup: bool, **options: Any) -> None:
        if options["BLOCK"] == BLOCKS[0]:
            raise OutOfResources(1, 0, "memory")
        if not warmup:
            self.launched.append(options["BLOCK"])
        self.fn.run(*args, warmup=warmup, **options)


def tuned(name: str, kernel: Any) -> Any:
    """A tuned kernel with a name of its own."""
    configs = [triton.Config({"BLOCK": size}) for size in BLOCKS]
    tuner = triton.autotune(configs, key=["elements"], do_bench=bench)(kernel)
    tuner.base_fn = type(write_block)(write_block.__code__, globals())
    tuner.base_fn.__qualname__ = name
    return tuner


class Launcher(KernelInterface[Any]):
    """Goes on with the kernel that it launched first, as FlagGems' does."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.kernel_cache = fn, ({},)

    def run(self, out: Any, elements: int, **options: Any) -> None:
        (kept,) = self.kernel_cache
        if elements not in kept:
            self.fn.run(out, elements, **options)
            kept[elements] = self.fn.best_config.kwargs
        else:
            self.fn.fn.run(out, elements, **options, **kept[elements])


SMALL = Small(triton.jit(write_block))
KERNEL, CHOOSY = tuned("kernel", triton.jit(write_block)), tuned("choosy", SMALL)
LAUNCHER = Launcher(tuned("launched", triton.jit(write_block)))


def ran(kernel: Any, elements: int) -> int:
    """The block size that ran."""
    out = torch.zeros(elements, dtype=torch.int32)
    kernel[(1,)](out, elements)
    return int(out[0])


def start(name: str, rank: int, meeting_point: str) -> Mapping[str, Any]:
    """A start, with what ran, and how often something had been timed, at each place of it."""
    said: list[str] = []
    logging.getLogger("fl_dispatch").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    torch.set_num_threads(1 + rank * (name == "later"))
    if name == "unsealed":
        os.environ["VLLM_FL_SEAL_TACTICS"] = "0"
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=two_ranks.RANKS)
    group = dist.new_group(list(range(two_ranks.RANKS)), backend="gloo")
    planted.extend(0.0 if size == FASTEST[name][rank] else SLOWEST for size in BLOCKS)
    found: dict[str, Any] = {}
    freeze_dispatch()
    tactics.begin()
    found["alone"] = ran(KERNEL, 100), ran(LAUNCHER, 100)
    if rank == 1:
        ran(KERNEL, 200)
    found["timed in the start"] = len(timed)
    agree_on_tactics(group)
    found["agreed"] = ran(KERNEL, 100), ran(LAUNCHER, 100)
    found["met by rank 1"] = ran(KERNEL, 200)
    found["new"] = ran(KERNEL, 300), ran(CHOOSY, 300)
    found["launched"] = SMALL.launched
    agree_on_tactics(group)
    found["elsewhere"] = tactics.timed_elsewhere()
    found["again"] = ran(KERNEL, 100), ran(KERNEL, 200), ran(KERNEL, 300)
    found["timed in all"] = len(timed)
    tactics.begin()
    found["another start"] = ran(KERNEL, 100), ran(KERNEL, 300)
    found["timed in it"] = len(timed) - found["timed in all"]
    manifest = get_default_manager().freezer.manifest
    assert manifest is not None
    return {**found, "said": said, "manifest": manifest.as_data()["tactics"], "hash": manifest.hash}


if __name__ == "__main__":
    two_ranks.main(start)
