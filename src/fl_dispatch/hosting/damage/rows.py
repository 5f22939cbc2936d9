"""Damaged rows of logits: one reduction on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def damaged_rows(logits: Tensor) -> Tensor:
    """1 for each row ``[rows, vocabulary]`` with NaN or infinity, else 0, in int32.

    Negative infinity beside numbers is a mask, which models have; a row of it alone is damaged.
    """
    highest = logits.amax(-1)
    return (highest - highest).ne(0).to(torch.int32)  # NaN from NaN and from infinity
