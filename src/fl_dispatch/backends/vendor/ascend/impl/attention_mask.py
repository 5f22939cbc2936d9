"""The mask of the attention kernel's compressed modes, which does not depend on lengths."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

SIZE = 2048
"""Number of rows and columns, which the documentation fixes."""


@functools.cache
def triangle(device: torch.device) -> Tensor:
    """Return the upper triangle without the diagonal, ``[2048, 2048]``, bool, true for hidden keys; cached by device.

    With ``sparse_mode`` 3 the kernel aligns it with the last query and the last key of each request; with 4 it derives
    the band from it.
    """
    return torch.ones(SIZE, SIZE, dtype=torch.bool, device=device).triu_(1)
