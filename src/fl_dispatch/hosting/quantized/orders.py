"""The orders in which checkpoints store weights, unpacked once into the one form of each operator.

Hosts load every parameter as the checkpoint has it, a rank's part of it. See docs/guide/quantization.md for the forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from .remedies import OUT_OF_ORDER

WORD = 32
"""Bits of an element of a packed parameter; the first number of a word is in its lowest bits."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ: the place in its word of each of eight numbers."""
REORDERED = ("group", "dynamic")
"""The values of ``actorder`` that give columns groups of their own; others leave the order as it is."""
UNSET = torch.finfo(torch.float8_e4m3fn).min
"""Scales that may not be loaded are filled with less than this."""
UNSET_BYTE = 0xFF
"""A scale of one byte that may not be loaded: NaN in float8_e4m3fn and float8_e8m0fnu."""

MOST_CHANGE = 4e-3
"""How much of a weight's scales, by their norm, rounding to a half type may change: twice what bfloat16 does."""


def is_unset(values: Tensor) -> bool:
    """Whether some of a layer's scales were never loaded; other parameters do not show it."""
    return values.dtype.is_floating_point and values.dtype.itemsize > 1 and not bool((values > UNSET).all())


def whole_words(bits: int) -> int:
    """The least count of packed numbers that fill whole words."""
    return WORD // gcd(WORD, bits)


def unpack(words: Tensor, bits: int, dim: int, places: Sequence[int] | None = None) -> Tensor:
    """Numbers of ``bits`` bits, int32, that lie packed along a dimension.

    Args:
        words: int32.
        bits: of a number.
        dim: the dimension.
        places: the place in its word of each of a word's numbers, where they are not in order.
    """
    words = words.movedim(dim, -1)
    if WORD % bits:
        return _unpack_across_words(words, bits).movedim(-1, dim)
    shifts = torch.tensor(places or range(WORD // bits), dtype=torch.int32, device=words.device) * bits
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, dim)


def _unpack_across_words(words: Tensor, bits: int) -> Tensor:
    """Numbers that lie one after the other in the bits of ``bits`` words, some of them in two words."""
    parts = words.reshape(*words.shape[:-1], words.shape[-1] // bits, bits).long() & 0xFFFFFFFF
    first = torch.arange(WORD, device=words.device) * bits
    word, shift = first // WORD, first % WORD
    next_word = (word + 1).clamp(max=bits - 1)
    numbers = (parts[..., word] >> shift | parts[..., next_word] << (WORD - shift)) & ((1 << bits) - 1)
    return numbers.int().reshape(*words.shape[:-1], words.shape[-1] * WORD // bits)


def packed_weight(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers ``[..., columns, inner]`` from 0 as ``weight_only_linear`` takes them.

    Numbers of 8 bits move by 128 into int8, and so must their zero points. Those of 2 and 3 bits, which have none,
    become numbers of 4 with the same distance from the middle.
    """
    if bits == 8:
        return (numbers - 128).to(torch.int8).contiguous()
    numbers = numbers + (8 - (1 << bits - 1))
    small = numbers.to(torch.uint8)
    return (small[..., ::2] | (small[..., 1::2] << 4)).contiguous()


def zero_points(numbers: Tensor, bits: int) -> Tensor:
    """Zero points ``[..., columns, groups]`` from 0, as :func:`packed_weight` moves the numbers: int8."""
    return (numbers - (128 if bits == 8 else 0)).to(torch.int8).contiguous()


def scales_of_bytes(stored: Tensor, dtype: torch.dtype, factor: Tensor | None = None) -> Tensor:
    """Scales of 8 bits in a wider type, NaN for those that are not loaded.

    Args:
        stored: exponents of two as bytes; or float8_e4m3fn, which are rounded once after they were multiplied.
        dtype: of the result.
        factor: of all scales of a column, float32.

    Raises:
        ValueError: the type does not have one of them; or with a factor, rounding to it changes a weight's scales by
            more than :data:`MOST_CHANGE` of their size, as a half type with few exponents may.
    """
    kind = torch.float8_e8m0fnu if stored.dtype is torch.uint8 else stored.dtype
    every = torch.arange(256, dtype=torch.uint8).view(kind).float()  # not every device has such types
    exact = every.to(stored.device)[stored.view(torch.uint8).int()]
    exact = exact if factor is None else exact * factor
    scales = exact.to(dtype)
    beyond = exact[scales.isinf() if factor is not None else (scales.float() != exact) & ~exact.isnan()]
    if not beyond.numel() and factor is not None:
        there = exact.nan_to_num()
        size, change = (each.norm(dim=(-2, -1)) for each in (there, scales.nan_to_num().float() - there))
        beyond = there[change > MOST_CHANGE * size].abs()
        beyond = beyond[beyond > 0].sort().values
    if beyond.numel():
        raise ValueError(f"{dtype} does not have scales of {beyond[0]:g}, which the checkpoint has; serve in bfloat16")
    return scales


def scale_of_columns(scale: Tensor, widths: Sequence[int]) -> Tensor:
    """A scale for each column, ``[columns, 1]``, float32.

    Args:
        scale: one for each column, for each of the layers that the host merged into this one, or for all of it. Only
            the first one is set of merged layers that the checkpoint merged too.
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


def scale_of_rows(scale: Tensor, parts: int) -> Tensor:
    """The scale of a layer's input, float32: ``[1]``, or ``[parts]`` if merged layers have different ones.

    Args:
        scale: one for each of the layers that the host merged into this one, or for all of it. Only the first one is
            set of merged layers that the checkpoint merged too.
        parts: the number of merged layers.
    """
    scale = scale.float().flatten()
    each = torch.where(scale > UNSET, scale, scale[0])
    return each[:1].contiguous() if scale.numel() != parts or bool((each == each[0]).all()) else each


def scale_of_experts(scale: Tensor, columns: int) -> Tensor:
    """A scale for each column of each expert's weight, ``[experts, columns, 1]``, float32.

    Args:
        scale: for each expert one for each column, for each of its equal parts (gate and ``up``), or for all of it.
        columns: of a weight.

    Raises:
        ValueError: there are other numbers of scales.
    """
    each = scale.float().reshape(scale.shape[0], scale.shape[1:].numel())
    if each.shape[1] not in (1, 2, columns) or columns % each.shape[1]:
        raise ValueError(f"{each.shape[1]} scales for {columns} columns of an expert")
    return each.repeat_interleave(columns // each.shape[1], 1)[..., None].contiguous()


def moves_columns(groups: Tensor) -> bool:
    """Whether ``g_idx`` of ``gptq``, the group of each column (last dimension), puts any out of order."""
    return groups.shape[-1] > 1 and bool((groups.diff(dim=-1) < 0).any())


def loads_columns_in_order(loader: Callable[..., None], prefix: str | None) -> Callable[..., None]:
    """A loader of ``g_idx``, the group of each column, that refuses columns out of order."""

    def load(parameter: Any, loaded: Tensor, *args: Any, **named: Any) -> None:
        if moves_columns(loaded):
            raise ValueError(f"'g_idx' of {prefix} {OUT_OF_ORDER}")
        loader(parameter, loaded, *args, **named)

    return load


def unset(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scales that are not loaded yet."""
    if dtype.itemsize == 1:
        return torch.full(shape, UNSET_BYTE, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.finfo(dtype).min, dtype=dtype)
