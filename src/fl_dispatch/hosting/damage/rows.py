"""Find damaged rows of logits, mark and overwrite them in one pass on the device."""

from __future__ import annotations

import functools
import itertools
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
"""Whether marks lie in host memory → the kernel's error, after which it is not launched for such marks any more; out of
memory, only for that call."""
KEPT = 64
"""The number of schedulings that have marks at a time, more than can be under way. A host reads the output of one rank,
and the others drop theirs before their devices have written it."""


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
    marks = _by_kernel(logits, None) if _has_kernel(logits, in_host_memory=False) else None
    if marks is not None:
        return marks
    highest = logits.amax(-1)
    damaged = (highest - highest).ne(0)  # NaN from NaN and from infinity
    if detect_device().accelerator or bool(damaged.any()):  # reading it on an accelerator would wait for the device
        logits.masked_fill_(damaged.unsqueeze(-1), 0.0)
    return damaged.int()


class Slot:
    """The marks of one scheduling in host memory: 1 for each row that was damaged in one of its steps, else 0.

    Args:
        marks: ``[most rows]``, int32.

    Attributes:
        rows: number of rows that the steps have.
    """

    __slots__ = ("_words", "marks", "rows")

    def __init__(self, marks: Tensor) -> None:
        self.marks, self.rows = marks, 0
        self._words = marks.numpy()

    def clear(self, rows: int) -> None:
        """Begin a scheduling."""
        self._words.fill(0)
        self.rows = rows

    def found(self) -> bool:
        """Whether a row is marked, once the device has finished the steps."""
        return bool(self._words.any())


class HostMarks:
    """Marks of damaged rows in host memory, where the device writes them itself, so that nothing is copied.

    A scheduling takes the next one of :data:`KEPT` slots, which are allocated once.

    Args:
        most_rows: the largest number of rows of a step.
    """

    def __init__(self, most_rows: int) -> None:
        self.on_host = not detect_device().accelerator
        self.most_rows = most_rows + -most_rows % 4  # so that each slot is aligned to 16 bytes
        slots = torch.zeros(KEPT, self.most_rows, dtype=torch.int32, device="cpu", pin_memory=not self.on_host)
        self._slots = itertools.cycle([Slot(marks) for marks in slots])

    def mark(self, logits: Tensor, slot: Slot | None = None) -> Slot | None:
        """Mark and overwrite damaged rows, see :func:`damaged_rows`.

        Args:
            logits: ``[rows, vocabulary]``, floating point; damaged rows are overwritten.
            slot: marks of the same requests' rows in an earlier step, which get the new ones too.

        Returns:
            The marks. ``None`` if no kernel takes these logits, or if ``slot`` is of other rows.
        """
        rows = logits.shape[0]
        if rows > self.most_rows if slot is None else rows != slot.rows:
            return None
        if not (self.on_host or _has_kernel(logits, in_host_memory=True)):
            return None
        if slot is None:
            slot = next(self._slots)
            slot.clear(rows)
        if self.on_host:
            slot.marks[:rows].bitwise_or_(damaged_rows(logits))
            return slot
        return None if _by_kernel(logits, slot.marks) is None else slot


def host_marks(most_rows: int) -> HostMarks | None:
    """Return memory for marks; ``None`` if this machine's device cannot write them, see :class:`HostMarks`."""
    device = detect_device()
    can_write = device.writes_pinned_memory and not why_unavailable() if device.accelerator else True
    return HostMarks(most_rows) if can_write else None


def _has_kernel(logits: Tensor, in_host_memory: bool) -> bool:
    fits = logits.stride(-1) == 1 and logits.device.type == detect_device().torch_type
    return fits and in_host_memory not in FAILED and not why_unavailable()


def _by_kernel(logits: Tensor, marks: Tensor | None) -> Tensor | None:
    """Launch the kernel; return ``None`` if it fails."""
    try:
        found: Tensor = _kernel().damaged_rows_in_one_launch(logits, marks)
    except Exception as error:
        if not is_out_of_memory(error):  # then Triton compiles no such kernel for this chip
            FAILED[marks is not None] = str(error)
        logger.info("PyTorch's operators look for damaged logits, because the kernel fails: %s", error)
        return None
    return found


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
