"""Find damaged rows of logits, mark and overwrite them in one pass on the device."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import why_unavailable
from fl_dispatch.knowledge.error_kinds import is_out_of_memory
from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)

FAILED: list[str] = []
"""The error of the kernel, after which PyTorch's operators replace it; out of memory, only for that call."""


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
    device = detect_device()
    if logits.stride(-1) == 1 and logits.device.type == device.torch_type and not (FAILED or why_unavailable()):
        try:
            from .rows_kernel import damaged_rows_in_one_launch

            return damaged_rows_in_one_launch(logits)
        except Exception as error:
            if not is_out_of_memory(error):  # then Triton compiles no such kernel for this chip
                FAILED.append(str(error))
            logger.info("PyTorch's operators look for damaged logits, because the kernel fails: %s", error)
    highest = logits.amax(-1)
    damaged = (highest - highest).ne(0)  # NaN from NaN and from infinity
    if device.accelerator or bool(damaged.any()):  # reading it on an accelerator would wait for the device
        logits.masked_fill_(damaged.unsqueeze(-1), 0.0)
    return damaged.int()


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
