"""The kernel of :mod:`rows`: a program checks one row, and reads it a second time only to overwrite it."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices import device_of
from fl_dispatch.devices.launcher import Launcher

TILE = 16384
"""Elements that a program reads at a time: rows are few and wide, so a program keeps many loads in flight."""
MOST_WARPS, MOST_THREADS = 32, 1024


@triton.jit(do_not_specialize=["width"])
def _mark(logits, marks, width, STRIDE, TILE: tl.constexpr, ONLY_DAMAGED: tl.constexpr):
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
    if not ONLY_DAMAGED:
        tl.store(marks + row, mark.to(tl.int32))
    if mark:
        if ONLY_DAMAGED:
            tl.store(marks + row, 1)
        zeros = tl.zeros((TILE,), logits.dtype.element_ty)
        for start in range(0, width, TILE):
            column = start + tl.arange(0, TILE)
            tl.store(source + column, zeros, mask=column < width)


_launch = Launcher(_mark)


@functools.cache
def _warps(device: torch.device) -> int:
    """Return the number of warps of a program; on some chips a warp has 64 threads."""
    return min(MOST_WARPS, MOST_THREADS // device_of(device.type).warp_size(device.index or 0))


def damaged_rows_in_one_launch(logits: Tensor, marks: Tensor | None = None) -> Tensor:
    """See :func:`fl_dispatch.hosting.damage.rows.damaged_rows`; elements of a row are contiguous.

    Args:
        logits: ``[rows, vocabulary]``.
        marks: ``[rows]``, int32, where only damaged rows are marked; new ones on the device if ``None``.
    """
    rows, width = logits.shape
    only_damaged = marks is not None
    if marks is None:
        marks = logits.new_empty(rows, dtype=torch.int32)
    if rows:
        numbers = (logits.stride(0), TILE, only_damaged)
        _launch((rows, 1, 1), (logits, marks), numbers, sizes=(width,), warps=_warps(logits.device))
    return marks
