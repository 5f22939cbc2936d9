"""Inputs of a product as quantization to e2m1 leaves them, for devices without products of such numbers.

Each result is a number of e2m1 times a scale of few bits, so that every type of a model has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.quantization import E2M1

FP8 = torch.float8_e4m3fn
EXPONENT = 0x7F800000
"""The bits of float32's exponent."""
QUARTER = 1 << 21
"""A quarter of the step from a power of two to the next, in float32's bits."""
LEAST = 2.0**-126
"""The least scale of a group, that of zeros too."""


def _nearest(x: Tensor) -> Tensor:
    """The nearest numbers of e2m1, ties to even ones."""
    x = x.clamp(-E2M1[-1], E2M1[-1])
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round() * step


def _grouped(x: Tensor, group: int) -> Tensor:
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // group, group)


def mxfp4(x: Tensor, group: int) -> Tensor:
    """Rows with a power of two for each group: that of its largest magnitude, from 1.75 times on the next, over 4."""
    groups = _grouped(x, group)
    bits = groups.abs().amax(-1, keepdim=True).view(torch.int32)
    scale = ((bits + QUARTER) & EXPONENT).view(torch.float32).div(4).clamp(min=LEAST)
    return (_nearest(groups / scale) * scale).view(x.shape).to(x.dtype)


def nvfp4(x: Tensor, group: int, factor: Tensor) -> Tensor:
    """``factor`` times the rows with a scale in fp8 for each group, rounded with that factor."""
    groups = _grouped(x, group) * factor
    scale = (groups.abs().amax(-1, keepdim=True) / E2M1[-1]).clamp(max=torch.finfo(FP8).max).to(FP8).float()
    numbers = _nearest(groups / torch.where(scale > 0, scale, 1.0))
    return (numbers * scale).view(x.shape).to(x.dtype)
