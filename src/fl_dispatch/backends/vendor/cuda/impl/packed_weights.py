"""Weights of few bits in the layouts of the compiled kernels, converted once from the operator's layout.

Marlin (Frantar et al., arXiv 2408.11743) multiplies tiles of 16 x 64 elements. The library repacks the numbers; scales
and zero points must follow the order in which its threads hold a tile's columns.

Converted weights have separate memory at a stable address, also after a write to the weight. They are not inference
tensors, because those could not be overwritten outside inference mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_dispatch.ops.quantization import FP8

WORD = torch.int32
NAN_RULES = {"ieee": 1, "largest": 2}


@dataclass(frozen=True)
class NumberType:
    """A number type, which vLLM's operators encode as one integer.

    Args:
        exponent, mantissa: bits of each; integers have no exponent.
        signed: whether numbers have a sign.
        bias: the offset that is subtracted from an integer.
        nan: the rule for bit patterns that are NaN, one of :data:`NAN_RULES`.
    """

    exponent: int
    mantissa: int
    signed: bool = False
    bias: int = 0
    nan: str = "ieee"

    @property
    def code(self) -> int:
        """The type's integer code."""
        finite_only = self.nan == "largest"
        found, at = 0, 0
        for value, bits in (
            (self.exponent, 8), (self.mantissa, 8), (self.signed, 1), (self.bias, 32), (finite_only, 1),
            (NAN_RULES[self.nan], 8),
        ):  # fmt: skip
            found |= int(value) << at
            at += bits
        return found


FOUR_BITS, EIGHT_BITS = NumberType(0, 4, bias=8), NumberType(0, 8, bias=128)
FOUR_BITS_WITH_ZERO = NumberType(0, 4)
FLOAT8 = NumberType(4, 3, signed=True, nan="largest")


def number_type(weight: Tensor, has_zero: bool) -> NumberType:
    """Return the number type of a weight in the operator's layout."""
    if weight.dtype is torch.uint8:
        return FOUR_BITS_WITH_ZERO if has_zero else FOUR_BITS
    return FLOAT8 if weight.dtype is FP8 else EIGHT_BITS


def bits(weight: Tensor) -> int:
    """Bits of each number of a weight."""
    return 4 if weight.dtype is torch.uint8 else 8


def words(weight: Tensor) -> Tensor:
    """Unsigned numbers in words ``[inner / numbers in a word, columns]``; words of a column are adjacent."""
    stored = weight.detach().view(torch.uint8)
    if weight.dtype is torch.int8:
        stored = stored ^ 128  # shift the range from -128..127 to 0..255
    return stored.contiguous().view(WORD).t()


def reuse(made: Tensor, before: Tensor | None) -> Tensor:
    """Copy into the existing tensor if shape and dtype match, because captured graphs hold its address."""
    if before is None or before.shape != made.shape or before.dtype is not made.dtype:
        return made
    return before.copy_(made)


# -- Marlin -----------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
def marlin_numbers(weight: Tensor, before: Tensor | None) -> Tensor:
    """Repack a weight into Marlin's tiles."""
    inner, columns = weight.shape[1] * (8 // bits(weight)), weight.shape[0]
    made = torch.ops._C.gptq_marlin_repack(words(weight).contiguous(), inner, columns, bits(weight), False)
    return reuse(made, before)


def scales_of_tiles(scale: Tensor) -> Tensor:
    """Scales ``[columns, groups]`` as ``[groups, columns]`` in the order of a tile's columns.

    With several groups a thread reads the scales of 8 columns with a distance of 8. With one group it applies the
    scales to the result, in pairs of columns with a distance of 8.
    """
    columns, groups = scale.shape
    by_group = scale.detach().t()
    if groups > 1:
        ordered = by_group.reshape(groups, -1, 8, 8).transpose(-1, -2)
    else:
        ordered = by_group.reshape(groups, -1, 4, 4, 2).transpose(-2, -3)
    return ordered.reshape(groups, columns).contiguous()


@torch.inference_mode(False)
def marlin_scales(scale: Tensor, before: Tensor | None) -> Tensor:
    """Reorder the scales of integers for Marlin."""
    return reuse(scales_of_tiles(scale), before)


@torch.inference_mode(False)
def marlin_float_scales(scale: Tensor, before: Tensor | None) -> Tensor:
    """Reorder the scales of fp8 and correct the exponent bias.

    The kernel copies fp8's exponent bits into the half type; the bias of fp8 is 7, of float16 15, of bfloat16 127.
    """
    bias = 127 if scale.dtype is torch.bfloat16 else 15
    return reuse(scales_of_tiles(scale) * 2.0 ** (bias - 7), before)


@torch.inference_mode(False)
def marlin_zeros(zero: Tensor, before: Tensor | None) -> Tensor:
    """Pack 4-bit zero points ``[columns, groups]`` into words of 8 columns, even columns first."""
    columns, groups = zero.shape
    ordered = zero.detach().t().reshape(groups, -1, 8, 8).transpose(-1, -2).reshape(groups, -1, 4, 2).transpose(-1, -2)
    numbers = ordered.reshape(groups, columns // 2, 2).to(torch.uint8)
    made = (numbers[..., 0] | (numbers[..., 1] << 4)).contiguous().view(WORD)
    return reuse(made, before)


# -- Machete ----------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
def machete_numbers(dtype: torch.dtype, weight: Tensor, before: Tensor | None) -> Tensor:
    """Repack a weight into the tiles of CUTLASS's mixed-type product, for rows of a half type."""
    kind = number_type(weight, False).code
    return reuse(torch.ops._C.machete_prepack_B(words(weight), dtype, kind, dtype), before)


@torch.inference_mode(False)
def by_groups(scale: Tensor, before: Tensor | None) -> Tensor:
    """Transpose scales to ``[groups, columns]``."""
    return reuse(scale.detach().t().clone(memory_format=torch.contiguous_format), before)
