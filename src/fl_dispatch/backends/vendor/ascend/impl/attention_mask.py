"""The mask that the attention kernel takes in its compressed modes, whatever the lengths."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

SIZE = 2048
"""Rows and columns, which the documentation fixes."""


@functools.cache
def triangle(device: torch.device) -> Tensor:
    """The upper triangle without the diagonal, ``[2048, 2048]``, bool, true where a key is hidden. Made once a device.

    With ``sparse_mode`` 3 the kernel lays it against the last query and the last key of each request, with 4 it takes
    the band from it.
    """
    return torch.ones(SIZE, SIZE, dtype=torch.bool, device=device).triu_(1)
