"""Find damaged rows of logits, mark and overwrite them in one pass on the device."""

from __future__ import annotations

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


def mark_in_host_memory(logits: Tensor, earlier: Tensor | None = None) -> Tensor | None:
    """Mark and overwrite damaged rows, with the marks in host memory, so that nothing is copied from the device.

    See :func:`damaged_rows`.

    Args:
        logits: ``[rows, vocabulary]``, floating point; damaged rows are overwritten.
        earlier: marks of the same requests' rows in an earlier step, which get the new ones too.

    Returns:
        1 for each row that was damaged in one of the steps, else 0, ``[rows]``, int32, in host memory. They are valid
        once the device has finished the step. ``None`` if this device cannot write them, or if ``earlier`` is of other
        rows.
    """
    if earlier is not None and len(earlier) != len(logits):
        return None
    device = detect_device()
    if not device.accelerator:
        marks = damaged_rows(logits)
        return marks if earlier is None else earlier.bitwise_or_(marks)
    if not device.writes_pinned_memory or not _has_kernel(logits, in_host_memory=True):
        return None
    if earlier is None:
        earlier = torch.zeros(len(logits), dtype=torch.int32, pin_memory=True)
    return _by_kernel(logits, earlier)


def _has_kernel(logits: Tensor, in_host_memory: bool) -> bool:
    fits = logits.stride(-1) == 1 and logits.device.type == detect_device().torch_type
    return fits and in_host_memory not in FAILED and not why_unavailable()


def _by_kernel(logits: Tensor, marks: Tensor | None) -> Tensor | None:
    """Launch the kernel; return ``None`` if it fails."""
    try:
        from .rows_kernel import damaged_rows_in_one_launch

        return damaged_rows_in_one_launch(logits, marks)
    except Exception as error:
        if not is_out_of_memory(error):  # then Triton compiles no such kernel for this chip
            FAILED[marks is not None] = str(error)
        logger.info("PyTorch's operators look for damaged logits, because the kernel fails: %s", error)
        return None


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
