"""A quantized product of one row asks for the beginning of the next one's weight, when it is done itself.

Between two such products small kernels run, and the device's memory is idle. A program's last act is to have a slice of
the next weight brought into the L2 cache; no program waits for that, and no result depends on it.
:mod:`fl_dispatch.successors` knows the next weight. The instruction is one of NVIDIA GPUs from compute capability 9 on.
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
"""The least that has the instruction."""
BYTES = 3 << 20
"""Asked for at most."""
ASKING = 2
"""Programs of each processor that ask: the last ones, because late requests fill the time of idle memory."""
LINE = 128
"""Bytes of a line, a multiple of which each program asks for."""
MOST = 1 << 19
"""Bytes that a program asks for at most: the instruction has 16 bits for their number, in units."""
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
    """Programs that ask, ``each`` on every processor; 0 where the device has no such instruction."""
    found = None if INTERPRETED else capability(device)
    return each * processors(device) if found is not None and found >= CAPABILITY else 0


def after(weight: Tensor, programs: int) -> tuple[Tensor, tuple[int, int, int], bool]:
    """The weight to ask for, the numbers that :func:`ask` takes, and whether to ask.

    Args:
        weight: of a product that is launched.
        programs: that make it.
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
