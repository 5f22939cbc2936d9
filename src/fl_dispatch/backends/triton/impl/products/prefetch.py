"""Prefetch the beginning of the next weight at the end of a quantized product of one row.

Between two such products small kernels run, and the device's memory is idle. As its last step a program prefetches a
slice of the next weight into the L2 cache; no program waits for the slice, and no result depends on it.
:mod:`fl_dispatch.successors` finds the next weight. NVIDIA GPUs have the instruction from compute capability 9 on.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch import successors
from fl_dispatch.devices.launcher import INTERPRETED
from fl_dispatch.settings import get_settings

from ..launch import capability, processors

CAPABILITY = (9, 0)
"""Lowest compute capability with the instruction."""
BYTES = 3 << 20
"""Most bytes of a prefetch."""
ASKING = 2
"""Programs of each processor that prefetch: the last ones, because memory is idle after them."""
LINE = 128
"""Bytes of a cache line; each program prefetches a multiple."""
MOST = 1 << 19
"""Most bytes that a program prefetches: the instruction has 16 bits for their number in units."""
UNIT = 16
"""Divisor of addresses and sizes."""
NOTHING = (0, 0, 0), False


@triton.jit
def ask(weight, SIZE, SLICE, FIRST):
    """Ask for a program's slice of ``SIZE`` bytes, by its first thread; programs before ``FIRST`` have none."""
    place = tl.maximum(tl.program_id(0) - FIRST, 0)
    begin = place * SLICE
    size = tl.where(tl.program_id(0) < FIRST, 0, tl.minimum(SIZE - begin, SLICE))
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred asks;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 asks, thread, 0;
            setp.gt.and.s32 asks, $2, 0, asks;
            @asks cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [weight.to(tl.int64) + begin, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def _programs(device: torch.device, each: int) -> int:
    """Programs that prefetch, ``each`` on every processor; 0 if the device has no such instruction."""
    found = None if INTERPRETED else capability(device)
    return each * processors(device) if found is not None and found >= CAPABILITY else 0


def after(weight: Tensor, programs: int) -> tuple[Tensor, tuple[int, int, int], bool]:
    """Return the weight to prefetch, the numbers that :func:`ask` takes, and whether to prefetch.

    Args:
        weight: the weight of the product that is launched.
        programs: programs of that product.
    """
    if not weight.is_floating_point():  # int8 was not timed: its kernel would need more registers
        return weight, *NOTHING
    found = successors.after(weight)
    if found is None or found.device != weight.device or not get_settings().chip_features:
        return weight, *NOTHING
    asking = min(programs, _programs(found.device, ASKING))
    size = min(BYTES, asking * MOST, found.numel() * found.element_size()) // UNIT * UNIT
    if not (asking and size) or found.data_ptr() % UNIT:
        return weight, *NOTHING
    return found, (size, -(-size // (asking * LINE)) * LINE, programs - asking), True
