"""The kernels of :mod:`.one_pass`: the best token of each part of a row, and the best of these, or the row's damage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from fl_dispatch.devices.launcher import Launcher, Repeat

if TYPE_CHECKING:
    from fl_dispatch.hosting.damage.rows import Slot

PART = 1024
"""Elements of a part, as in vLLM's kernel."""
TILE = 4096
"""Elements that a program overwrites at a time."""


@triton.jit(do_not_specialize=["width"])
def _best_of_parts(
    logits, requests, temperatures, seeds, positions, values, columns, width, STRIDE, PARTS, PART: tl.constexpr
):
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    inside = column < width
    x = tl.load(logits + row.to(tl.int64) * STRIDE + column, mask=inside, other=float("-inf")).to(tl.float32)
    request = tl.load(requests + row).to(tl.int64)
    temperature = tl.load(temperatures + request, mask=request >= 0, other=0.0).to(tl.float32)
    seed = tl.load(seeds + request, mask=request >= 0, other=0)
    value, place = gumbel_noised_argmax(
        x,
        column,
        inside,
        seed,
        tl.load(positions + row),
        temperature,
        IS_DRAFTING=False,
        USE_FP64=False,
        APPLY_TEMPERATURE=False,
    )
    damaged = tl.max((~(x < float("inf"))).to(tl.int32), 0) > 0
    tl.store(values + row * PARTS + part, tl.where(damaged, float("nan"), value))
    tl.store(columns + row * PARTS + part, part * PART + place)


@triton.jit(do_not_specialize=["number", "width"])
def _best_of_row(
    values, columns, tokens, logits, marks, number, width, STRIDE, PARTS, PLACES: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0)
    part = tl.arange(0, PLACES)
    lowest = float("-inf")
    value = tl.load(values + row * PARTS + part, mask=part < PARTS, other=lowest)
    wrong = value != value
    highest, best = tl.max(tl.where(wrong, lowest, value), 0, return_indices=True)
    damaged = (tl.max(wrong.to(tl.int32), 0) > 0) | (highest == lowest)
    token = tl.load(columns + row * PARTS + best)
    tl.store(tokens + row, tl.where(damaged, 0, token).to(tl.int64))
    if damaged:
        tl.store(marks, number)
        tl.store(marks + 1 + row, number)
        source = logits + row.to(tl.int64) * STRIDE
        zeros = tl.zeros((TILE,), logits.dtype.element_ty)
        for start in range(0, width, TILE):
            column = start + tl.arange(0, TILE)
            tl.store(source + column, zeros, mask=column < width)


_launch_parts, _launch_rows = Launcher(_best_of_parts), Launcher(_best_of_row)


def parts_of(width: int) -> int:
    """Return the number of parts of a row."""
    return -(-width // PART)


def choose_first(
    logits: Tensor,
    requests: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    values: Tensor,
    columns: Tensor,
    tokens: Tensor,
    slot: Slot,
) -> tuple[Repeat, Repeat] | None:
    """Choose tokens, and return functions that launch both kernels again.

    :meth:`fl_dispatch.devices.launcher.Launcher.first` makes these functions.

    The first takes the addresses of logits, requests, temperatures, seeds, positions, values and columns, then the
    vocabulary. The second takes the addresses of values, columns, tokens, logits and the slot, then the slot's number
    and the vocabulary.
    """
    rows, width = logits.shape
    parts = parts_of(width)
    read = (logits, requests, temperatures, seeds, positions, values, columns)
    one = _launch_parts.first((rows, parts, 1), read, (logits.stride(0), parts, PART), sizes=(width,), warps=4)
    written = (values, columns, tokens, logits, slot.marks)
    numbers = (logits.stride(0), parts, triton.next_power_of_2(parts), TILE)
    other = _launch_rows.first((rows, 1, 1), written, numbers, sizes=(slot.number, width), warps=4)
    return None if one is None or other is None else (one, other)
