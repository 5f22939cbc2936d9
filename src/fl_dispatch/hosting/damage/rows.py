"""Damaged rows of logits: they are marked, and overwritten, in one pass on the device."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import why_unavailable
from fl_dispatch.knowledge.error_kinds import is_out_of_memory
from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)

FAILED: list[str] = []
"""The error of the kernel, after which PyTorch's operators do its work; one of memory counts for its call alone."""


def damaged_rows(logits: Tensor) -> Tensor:
    """Mark rows with NaN or infinity, and overwrite them by zeros.

    From NaN a sampler may take a token beyond the vocabulary, and the next step, which is under way before the host
    knows of the damage, would read past the table of embeddings. Negative infinity beside numbers is a mask, which
    models have; a row of it alone is damaged.

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
    if device.accelerator or bool(damaged.any()):  # an accelerator would have to be waited for
        logits.masked_fill_(damaged.unsqueeze(-1), 0.0)
    return damaged.int()


def damaged_tokens(rows: Tensor, ends: Tensor, tokens: Tensor) -> Tensor:
    """How many of each request's tokens were chosen from damaged rows.

    Rows behind a request's last token judged drafts that were rejected, so they say nothing about the request.

    Args:
        rows: of all requests, one after the other, see :func:`damaged_rows`.
        ends: ``[requests]``; where each request's rows end.
        tokens: ``[requests]``; how many each got. For one that got none, as in a part of its prompt, one row counts.
    """
    sums = pad(rows.cumsum(0), (1, 0))
    starts = pad(ends[:-1], (1, 0)).long()
    return sums[starts + tokens.clamp(min=1)] - sums[starts]
