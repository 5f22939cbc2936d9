"""Rotary embedding on several axes: a token of an image has a position in time, height and width.

Each frequency rotates by the position on one of the axes. The operator ``rotary_embedding`` takes one row per token, so
the rows of a step are assembled first, and token ``t`` takes row ``t``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def alternating_axes(spatial: int, frequencies: int) -> list[int]:
    """Return height (1) and width (2) in turn for the first ``spatial`` frequencies, then time (0)."""
    return [1 + index % 2 if index < spatial else 0 for index in range(frequencies)]


def step_tables(cos: Tensor, sin: Tensor, positions: Tensor, axes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return cosines and sines of a step's tokens, and the row of each token.

    Args:
        cos: ``[max_position, frequencies]``.
        sin: ``[max_position, frequencies]``.
        positions: ``[axes, tokens]``, int64.
        axes: ``[frequencies]``, int64: the axis of each frequency.

    Returns:
        Two tables ``[tokens, frequencies]`` and ``[tokens]``, int64.
    """
    rows = positions[axes].t()
    frequencies = torch.arange(rows.shape[1], device=rows.device)
    return cos[rows, frequencies], sin[rows, frequencies], torch.arange(rows.shape[0], device=rows.device)
