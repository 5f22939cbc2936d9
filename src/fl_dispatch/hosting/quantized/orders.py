"""The orders in which checkpoints store weights, unpacked once into the operator's form.

Hosts load a rank's part of every parameter in the checkpoint's form. See docs/guide/quantization.md for the forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from .remedies import OUT_OF_ORDER

WORD = 32
"""Bits of an element of a packed parameter, an int32 (a *word*); its first number is in its lowest bits."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ: the place of each of eight 4-bit numbers in an int32."""
REORDERED = ("group", "dynamic")
"""The values of ``actorder`` that give columns separate groups; others keep the order."""
UNSET = torch.finfo(torch.float8_e4m3fn).min
"""Scales that may stay unloaded are filled with less than this."""
UNSET_BYTE = 0xFF
"""Fill of one-byte scales that may stay unloaded: NaN in float8_e4m3fn and float8_e8m0fnu."""

MOST_CHANGE = 4e-3
"""Relative change of a weight's scales, by their norm, that rounding to a half type may cause: twice bfloat16's."""


def is_unset(values: Tensor) -> bool:
    """Whether some of a layer's scales were never loaded; other parameters do not show this."""
    return values.dtype.is_floating_point and values.dtype.itemsize > 1 and not bool((values > UNSET).all())


def whole_words(bits: int) -> int:
    """Return the smallest count of packed numbers that fills whole words."""
    return WORD // gcd(WORD, bits)


def unpack(words: Tensor, bits: int, dim: int, places: Sequence[int] | None = None) -> Tensor:
    """Return numbers of ``bits`` bits, packed along a dimension, as int32.

    Args:
        words: int32.
        bits: bits of a number.
        dim: the dimension.
        places: the place of each number in its int32, if they are not in order.
    """
    words = words.movedim(dim, -1)
    if WORD % bits:
        return _unpack_across_words(words, bits).movedim(-1, dim)
    shifts = torch.tensor(places or range(WORD // bits), dtype=torch.int32, device=words.device) * bits
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, dim)


def _unpack_across_words(words: Tensor, bits: int) -> Tensor:
    """Return numbers stored consecutively in the bits of ``bits`` words, some of them across two words."""
    parts = words.reshape(*words.shape[:-1], words.shape[-1] // bits, bits).long() & 0xFFFFFFFF
    first = torch.arange(WORD, device=words.device) * bits
    word, shift = first // WORD, first % WORD
    next_word = (word + 1).clamp(max=bits - 1)
    numbers = (parts[..., word] >> shift | parts[..., next_word] << (WORD - shift)) & ((1 << bits) - 1)
    return numbers.int().reshape(*words.shape[:-1], words.shape[-1] * WORD // bits)


def packed_weight(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers ``[..., columns, inner]`` from 0 as ``weight_only_linear`` takes them.

    8-bit numbers are shifted by 128 into int8, like their zero points. Numbers of 2 and 3 bits have no zero points, and
    become 4-bit numbers with the same distance from the middle.
    """
    if bits == 8:
        return (numbers - 128).to(torch.int8).contiguous()
    numbers = numbers + (8 - (1 << bits - 1))
    small = numbers.to(torch.uint8)
    return (small[..., ::2] | (small[..., 1::2] << 4)).contiguous()


def zero_points(numbers: Tensor, bits: int) -> Tensor:
    """Return zero points ``[..., columns, groups]`` from 0, shifted like numbers by :func:`packed_weight`: int8."""
    return (numbers - (128 if bits == 8 else 0)).to(torch.int8).contiguous()


def scales_of_bytes(stored: Tensor, dtype: torch.dtype, factor: Tensor | None = None) -> Tensor:
    """Return 8-bit scales in a wider type, NaN for those that are not loaded.

    Args:
        stored: exponents of two as bytes; or float8_e4m3fn, rounded once after the multiplication.
        dtype: the result's dtype.
        factor: factor of all scales of a column, float32.

    Raises:
        ValueError: the type cannot represent a scale; or with a factor, rounding changes a weight's scales by more than
            :data:`MOST_CHANGE` of their size, as in a half type with few exponents.
    """
    kind = torch.float8_e8m0fnu if stored.dtype is torch.uint8 else stored.dtype
    every = torch.arange(256, dtype=torch.uint8).view(kind).float()  # some devices lack such types
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
    """Return a scale for each column, ``[columns, 1]``, float32.

    Args:
        scale: one for each column, for each of the layers that the host merged into this one, or for the whole layer.
            If the checkpoint merged the layers, too, only the first one is set.
        widths: columns of each of the merged layers.

    Raises:
        ValueError: the number of scales fits none of these.
    """
    scale, columns = scale.float().flatten(), sum(widths)
    if scale.numel() == columns:
        return scale.view(-1, 1).contiguous()
    if scale.numel() not in (1, len(widths)):
        raise ValueError(f"{scale.numel()} scales for {columns} columns of {len(widths)} merged layers")
    each = torch.where(scale > UNSET, scale, scale[0]).expand(len(widths))
    return each.repeat_interleave(torch.tensor(widths, device=scale.device)).view(-1, 1)


def scale_of_rows(scale: Tensor, parts: int) -> Tensor:
    """Return the scale of a layer's input, float32: ``[1]``, or ``[parts]`` if merged layers have different ones.

    Args:
        scale: one for each of the layers that the host merged into this one, or for the whole layer. If the checkpoint
            merged the layers, too, only the first one is set.
        parts: the number of merged layers.
    """
    scale = scale.float().flatten()
    each = torch.where(scale > UNSET, scale, scale[0])
    return each[:1].contiguous() if scale.numel() != parts or bool((each == each[0]).all()) else each


def scale_of_experts(scale: Tensor, columns: int) -> Tensor:
    """Return a scale for each column of each expert's weight, ``[experts, columns, 1]``, float32.

    Args:
        scale: for each expert one for each column, for each of its equal parts (gate and ``up``), or for the whole
            weight.
        columns: columns of a weight.

    Raises:
        ValueError: the number of scales fits none of these.
    """
    each = scale.float().reshape(scale.shape[0], scale.shape[1:].numel())
    if each.shape[1] not in (1, 2, columns) or columns % each.shape[1]:
        raise ValueError(f"{each.shape[1]} scales for {columns} columns of an expert")
    return each.repeat_interleave(columns // each.shape[1], 1)[..., None].contiguous()


def moves_columns(groups: Tensor) -> bool:
    """Whether ``g_idx`` of ``gptq``, the group of each column (last dimension), puts a column out of order."""
    return groups.shape[-1] > 1 and bool((groups.diff(dim=-1) < 0).any())


def loads_columns_in_order(loader: Callable[..., None], prefix: str | None) -> Callable[..., None]:
    """Return a loader of ``g_idx``, the group of each column, that refuses columns out of order."""

    def load(parameter: Any, loaded: Tensor, *args: Any, **named: Any) -> None:
        if moves_columns(loaded):
            raise ValueError(f"'g_idx' of {prefix} {OUT_OF_ORDER}")
        loader(parameter, loaded, *args, **named)

    return load


def unset(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return scales marked as not loaded."""
    if dtype.itemsize == 1:
        return torch.full(shape, UNSET_BYTE, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.finfo(dtype).min, dtype=dtype)
