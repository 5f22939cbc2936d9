"""The orders in which checkpoints store weights, unpacked once into the one form of each operator.

vLLM loads every parameter as the checkpoint has it, a rank's part of it. See docs/quantization.md for the forms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 32
"""Bits of an element of a packed parameter; the first number of a word is in its lowest bits."""
UNSET = torch.finfo(torch.float8_e4m3fn).min
"""vLLM fills scales that it may not load with less than this."""


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Numbers of ``bits`` bits, int32, that lie packed along a dimension."""
    words = words.movedim(dim, -1)
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, dim)


def packed_weight(numbers: Tensor, bits: int) -> Tensor:
    """Numbers ``[columns, inner]`` from 0 as ``weight_only_linear`` takes them.

    Those of 8 bits move by 128 into int8, and so must their zero points.
    """
    if bits == 8:
        return (numbers - 128).to(torch.int8).contiguous()
    pairs = numbers.to(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous()


def zero_points(numbers: Tensor, bits: int) -> Tensor:
    """Zero points ``[columns, groups]`` from 0 likewise."""
    return (numbers - (128 if bits == 8 else 0)).to(torch.int8).contiguous()


def scale_of_columns(scale: Tensor, widths: Sequence[int]) -> Tensor:
    """A scale for each column, ``[columns, 1]``, float32.

    Args:
        scale: one for each column, for each of the layers that vLLM merged into this one, or for all of it. Only the
            first one is set of merged layers that the checkpoint merged too.
        widths: columns of each of the merged layers.

    Raises:
        ValueError: there are other numbers of scales.
    """
    scale, columns = scale.float().flatten(), sum(widths)
    if scale.numel() == columns:
        return scale.view(-1, 1).contiguous()
    if scale.numel() not in (1, len(widths)):
        raise ValueError(f"{scale.numel()} scales for {columns} columns of {len(widths)} merged layers")
    each = torch.where(scale > UNSET, scale, scale[0]).expand(len(widths))
    return each.repeat_interleave(torch.tensor(widths, device=scale.device)).view(-1, 1)
