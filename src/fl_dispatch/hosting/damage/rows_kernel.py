"""The kernel of :mod:`rows`: a program checks one row, and reads it a second time only to overwrite it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices import device_of
from fl_dispatch.devices.launcher import Launcher, Repeat

if TYPE_CHECKING:
    from .rows import Slot

TILE = 16384
"""Elements that a program reads at a time: rows are few and wide, so a program keeps many loads in flight."""
MOST_WARPS, MOST_THREADS = 32, 1024


@triton.jit(do_not_specialize=["number", "width"])
def _mark(logits, marks, number, width, STRIDE, TILE: tl.constexpr, IN_SLOT: tl.constexpr):
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * STRIDE
    lowest = float("-inf")
    highest = tl.full((TILE,), lowest, tl.float32)
    damaged = tl.zeros((TILE,), tl.int32)
    for start in range(0, width, TILE):
        column = start + tl.arange(0, TILE)
        x = tl.load(source + column, mask=column < width, other=lowest).to(tl.float32)
        damaged |= (~(x < float("inf"))).to(tl.int32)
        highest = tl.maximum(highest, x)
    mark = (tl.max(damaged, 0) > 0) | (tl.max(highest, 0) == lowest)
    if not IN_SLOT:
        tl.store(marks + row, mark.to(tl.int32))
    if mark:
        if IN_SLOT:
            tl.store(marks, number)
            tl.store(marks + 1 + row, number)
        zeros = tl.zeros((TILE,), logits.dtype.element_ty)
        for start in range(0, width, TILE):
            column = start + tl.arange(0, TILE)
            tl.store(source + column, zeros, mask=column < width)


_launch = Launcher(_mark)


@functools.cache
def _warps(device: torch.device) -> int:
    """Return the number of warps of a program; on some chips a warp has 64 threads."""
    return min(MOST_WARPS, MOST_THREADS // device_of(device.type).warp_size(device.index or 0))


def damaged_rows_in_one_launch(logits: Tensor) -> Tensor:
    """See :func:`fl_dispatch.hosting.damage.rows.damaged_rows`; elements of a row are contiguous."""
    rows, width = logits.shape
    marks = logits.new_empty(rows, dtype=torch.int32)
    if rows:
        numbers = (logits.stride(0), TILE, False)
        _launch((rows, 1, 1), (logits, marks), numbers, sizes=(1, width), warps=_warps(logits.device))
    return marks


def mark_in_slot(logits: Tensor, slot: Slot) -> Repeat | None:
    """Mark damaged rows in a slot and overwrite them; see :meth:`fl_dispatch.devices.launcher.Launcher.first`.

    The function that it returns takes the addresses of logits and slot, the slot's number, and the vocabulary.
    """
    rows, width = logits.shape
    numbers, sizes = (logits.stride(0), TILE, True), (slot.number, width)
    return _launch.first((rows, 1, 1), (logits, slot.marks), numbers, sizes=sizes, warps=_warps(logits.device))
