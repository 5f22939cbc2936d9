"""Inputs of a product as quantization leaves them, where devices or weights have no products of such numbers.

A float is multiplied by a scale of few bits, so that every type of a model has the result; an integer's is rounded to
the type.
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


def _power(groups: Tensor, largest: int) -> Tensor:
    """A power of two for each group: that of its largest magnitude, from 1.75 times on the next, over ``largest``."""
    bits = groups.abs().amax(-1, keepdim=True).view(torch.int32)
    return ((bits + QUARTER) & EXPONENT).view(torch.float32).div(largest).clamp(min=LEAST)


def mxfp4(x: Tensor, group: int) -> Tensor:
    """Rows of e2m1 with a power of two for each group."""
    groups = _grouped(x, group)
    scale = _power(groups, 4)
    return (_nearest(groups / scale) * scale).view(x.shape).to(x.dtype)


def mxfp8(x: Tensor, group: int) -> Tensor:
    """Rows of float8_e4m3fn with a power of two for each group."""
    groups = _grouped(x, group)
    scale, most = _power(groups, 256), torch.finfo(FP8).max
    return ((groups / scale).clamp(-most, most).to(FP8).float() * scale).view(x.shape).to(x.dtype)


def int8(x: Tensor) -> Tensor:
    """Rows of int8 with a scale for each row: its largest magnitude over 127.5, the half of int8's range."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).div(127.5)
    numbers = (wide / torch.where(scale > 0, scale, 1.0)).round().clamp(-128, 127)
    return (numbers * scale).to(x.dtype)


def nvfp4(x: Tensor, group: int, factor: Tensor) -> Tensor:
    """``factor`` times the rows with a scale in fp8 for each group, rounded with that factor."""
    groups = _grouped(x, group) * factor
    scale = (groups.abs().amax(-1, keepdim=True) / E2M1[-1]).clamp(max=torch.finfo(FP8).max).to(FP8).float()
    numbers = _nearest(groups / torch.where(scale > 0, scale, 1.0))
    return (numbers * scale).view(x.shape).to(x.dtype)
