"""Weights of 4 bits in floating point, and their form in MXFP4."""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The numbers of e2m1, by their codes."""
GROUP = 32
"""Number of elements that share a scale in MXFP4."""


def codes(values: Tensor) -> Tensor:
    """Return the nearest numbers of e2m1, ties to even, as codes from 0 to 15."""
    ties = 1e-12 * (torch.arange(8) % 2)
    nearest = ((values.double().abs()[..., None] - MAGNITUDES).abs() + ties).argmin(-1)
    return (nearest + 8 * (values < 0)).to(torch.uint8)


def in_bytes(found: Tensor) -> Tensor:
    """Pack two codes into a byte, the first one in the low half."""
    return found[..., ::2] | found[..., 1::2] << 4


def numbers(stored: Tensor) -> Tensor:
    """Return the numbers in bytes of two codes."""
    found = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)
    return MAGNITUDES[(found & 7).long()] * (1 - 2 * (found >> 3).float())


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a weight ``[.., inner]`` as bytes ``[.., inner / 32, 16]``, and exponents ``[.., inner / 32]`` plus 127."""
    groups = weight.unflatten(-1, (-1, GROUP))
    exponents = (groups.abs().amax(-1, keepdim=True) / MAGNITUDES[-1]).log2().ceil().clamp(min=-127)
    return in_bytes(codes(groups / exponents.exp2())), (exponents[..., 0] + 127).to(torch.uint8)
