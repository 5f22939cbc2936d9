"""Find damaged rows of logits, mark and overwrite them in one pass on the device."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import why_unavailable
from fl_dispatch.knowledge.error_kinds import is_out_of_memory
from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)

FAILED: dict[bool, str] = {}
"""Whether marks lie in host memory → the error that ended the kernel's use for such marks. Running out of memory is not
recorded, because only that call fails."""
KEPT = 64
"""Slots for marks, one per scheduler call: more than can be in flight. A host reads the output of one rank, and the
others drop theirs before their devices have written it."""
ALIGNED = 16
"""Alignment of addresses in bytes; Triton compiles a separate kernel for addresses that lack it."""
MOST_NUMBER = (1 << 31) - 1
"""The largest number of a scheduler call; 1 follows it."""


def damaged_rows(logits: Tensor) -> Tensor:
    """Mark rows with NaN or infinity, and overwrite them by zeros.

    With NaN a sampler may choose a token outside the vocabulary. The next step starts before the host knows of the
    damage, and would read past the embedding table. Negative infinity next to finite numbers is a mask; a row of
    negative infinity alone is damaged.

    Args:
        logits: ``[rows, vocabulary]``, floating point; damaged rows are overwritten.

    Returns:
        1 for each damaged row, else 0, ``[rows]``, int32.
    """
    if _has_kernel(logits, in_host_memory=False):
        try:
            found: Tensor = _kernel().damaged_rows_in_one_launch(logits)
            return found
        except Exception as error:
            _give_up(error, in_host_memory=False)
    on_host = not detect_device().accelerator  # reading a number on an accelerator would wait for the device
    if on_host and _is_finite(logits):
        return logits.new_zeros(len(logits), dtype=torch.int32)
    return _with_operators(logits, on_host).int()


def _with_operators(logits: Tensor, on_host: bool) -> Tensor:
    highest = logits.amax(-1)
    damaged = (highest - highest).ne(0)  # NaN from NaN and from infinity
    if not on_host or bool(damaged.any()):
        logits.masked_fill_(damaged.unsqueeze(-1), 0.0)
    return damaged


def _is_finite(logits: Tensor) -> bool:
    """Whether the sum of logits in host memory is finite, and so each of them; a sum is faster than maxima.

    Sums of float16 overflow, and sums of its values in float32 are not faster.
    """
    return logits.dtype != torch.float16 and math.isfinite(logits.sum())


class Slot:
    """The marks of one scheduler call in host memory.

    Each call has its own number, which the device writes for damaged rows. A slot is therefore never cleared, and
    without damage the host compares a single number.

    Args:
        marks: ``[1 + most rows]``, int32: the call's number if any row was damaged in one of its steps, then the same
            for each row.

    Attributes:
        address: of the marks.
        number: the number of the scheduler call.
        rows: the number of rows that its steps have.
    """

    __slots__ = ("_words", "address", "marks", "number", "rows")

    def __init__(self, marks: Tensor) -> None:
        self.marks, self.address = marks, marks.data_ptr()
        self._words = marks.numpy()
        self.number = self.rows = 0

    def begin(self, rows: int) -> None:
        """Begin a scheduler call."""
        self.number = self.number % MOST_NUMBER + 1
        self.rows = rows

    def found(self) -> bool:
        """Whether a row is damaged, once the device has finished the steps."""
        return bool(self._words[0] == self.number)

    def damaged(self) -> list[int]:
        """Return 1 for each damaged row, else 0, once the device has finished the steps."""
        return [int(word == self.number) for word in self._words[1 : 1 + self.rows]]


class HostMarks:
    """Marks of damaged rows in host memory, where the device writes them itself, so that nothing is copied.

    A scheduler call takes the next one of :data:`KEPT` slots, which are allocated once.

    Args:
        most_rows: the largest number of rows of a step.
    """

    def __init__(self, most_rows: int) -> None:
        self.on_host = not detect_device().accelerator
        self.most_rows = most_rows
        words = 1 + most_rows + (-most_rows - 1) % 4  # so that each slot is aligned to 16 bytes
        slots = torch.zeros(KEPT, words, dtype=torch.int32, device="cpu", pin_memory=not self.on_host)
        self._slots = itertools.cycle([Slot(marks) for marks in slots])
        self._launches: dict[Any, Any] = {}
        """Layout of logits → a function that launches the kernel for them again."""

    def slot_of(self, rows: int, slot: Slot | None = None) -> Slot | None:
        """Return the marks of a step's rows: those of the same requests' rows in an earlier step, or new ones.

        ``None`` if the step has too many rows, or if ``slot`` is of other rows.
        """
        if slot is not None:
            return slot if rows == slot.rows else None
        if rows > self.most_rows:
            return None
        slot = next(self._slots)
        slot.begin(rows)
        return slot

    def mark(self, logits: Tensor, slot: Slot | None = None) -> Slot | None:
        """Mark and overwrite damaged rows, see :func:`damaged_rows`.

        Args:
            logits: ``[rows, vocabulary]``, floating point; damaged rows are overwritten.
            slot: marks of the same requests' rows in an earlier step, which get the new ones too.

        Returns:
            The marks. ``None`` if no kernel takes these logits, or if ``slot`` is of other rows.
        """
        rows, width = logits.shape
        if (slot := self.slot_of(rows, slot)) is None:
            return None
        if self.on_host:
            _mark_on_host(logits, slot)
            return slot
        address = logits.data_ptr()
        layout = (logits.stride(), logits.dtype, logits.get_device(), address % ALIGNED)
        launch = self._launches.get(layout)
        try:
            if launch is not None:
                launch((rows, 1, 1), (address, slot.address, slot.number, width))
            elif not _has_kernel(logits, in_host_memory=True):
                return None
            elif rows and (launch := _kernel().mark_in_slot(logits, slot)) is not None:
                self._launches[layout] = launch
        except Exception as error:
            self._launches.clear()
            _give_up(error, in_host_memory=True)
            return None
        return slot


def host_marks(most_rows: int) -> HostMarks | None:
    """Return memory for marks; ``None`` if this machine's device cannot write them, see :class:`HostMarks`."""
    device = detect_device()
    can_write = device.writes_pinned_memory and not why_unavailable() if device.accelerator else True
    return HostMarks(most_rows) if can_write else None


def _has_kernel(logits: Tensor, in_host_memory: bool) -> bool:
    fits = logits.stride(-1) == 1 and logits.device.type == detect_device().torch_type
    return fits and in_host_memory not in FAILED and not why_unavailable()


def _mark_on_host(logits: Tensor, slot: Slot) -> None:
    if _is_finite(logits):
        return
    damaged = _with_operators(logits, on_host=True)
    if damaged.any():
        slot.marks[0] = slot.number
        slot.marks[1 : 1 + slot.rows][damaged] = slot.number


def _give_up(error: Exception, in_host_memory: bool) -> None:
    """Launch the kernel no more for such marks, unless it lacked memory: Triton compiles no such kernel here."""
    if not is_out_of_memory(error):
        FAILED[in_host_memory] = str(error)
    logger.info("PyTorch's operators look for damaged logits, because the kernel fails: %s", error)


@functools.cache
def _kernel() -> Any:
    """Return the module of the kernel, which imports Triton."""
    from . import rows_kernel

    return rows_kernel


def damaged_tokens(rows: Tensor, ends: Tensor, tokens: Tensor) -> Tensor:
    """Return the number of each request's tokens that were chosen from damaged rows.

    Rows after a request's last token belong to rejected drafts, so they do not count.

    Args:
        rows: marks of all requests' rows in order, see :func:`damaged_rows`.
        ends: ``[requests]``: end of each request's rows.
        tokens: ``[requests]``: number of new tokens of each. For a request without one, as in a part of its prompt, one
            row counts.
    """
    sums = pad(rows.cumsum(0), (1, 0))
    starts = pad(ends[:-1], (1, 0)).long()
    return sums[starts + tokens.clamp(min=1)] - sums[starts]
