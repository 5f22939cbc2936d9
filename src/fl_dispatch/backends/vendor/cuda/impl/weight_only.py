"""Products of rows in a half type with weights of 4 or 8 bits, by Marlin and by Machete.

Both read repacked weights (:mod:`.packed_weights`), which are stored next to the original weights
(:mod:`fl_dispatch.weight_forms`), so undeclared weights are declined.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fl_dispatch import weight_forms
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.declaration import HALF_TYPES
from fl_dispatch.ops.quantization import FP4, FP8

from . import packed_weights
from .limits import capability, problem

MARLIN, MACHETE = "vendor.cuda.marlin", "vendor.cuda.machete"
MARLIN_GROUPS, MACHETE_GROUPS = (32, 64, 128), (64, 128)
MARLIN_TILES = ((64, 128), (128, 64))
"""Tiles of columns and their elements: a weight must consist of whole tiles of one of these shapes."""
MACHETE_TILES = ((128, 64),)
MARLIN_CAPABILITY = 80
LOCKS = 4
"""Marlin's locks for each processor, zero between calls."""


def _why_not(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    sizes: tuple[int, ...],
    tiles: tuple[tuple[int, int], ...],
) -> str:
    """Return why the kernel cannot take these sizes, dtypes or layouts, or an empty string."""
    if why := problem("x", x, contiguous=False):
        return why
    if weight.dtype is FP4:
        return "the kernel is asked for integers and fp8 only"
    if x.dtype not in HALF_TYPES or scale.dtype is not x.dtype:
        return f"x is {x.dtype} and scale {scale.dtype}, not one half type"
    columns, groups = scale.shape
    inner = x.shape[-1]
    if groups > 1 and (inner % groups or inner // groups not in sizes):
        return f"groups of {inner / groups:g} elements, not of {', '.join(map(str, sizes))} or whole columns"
    if not any(columns % wide == 0 and inner % long == 0 for wide, long in tiles):
        return f"a weight of {columns} columns of {inner} elements does not consist of whole tiles"
    if not weight.is_contiguous():
        return "weight is not contiguous"
    if any(part is not None and not hasattr(part, weight_forms.ATTRIBUTE) for part in (weight, scale, zero)):
        return "the host did not declare the weight, its scales or its zero points as tensors that stay"
    return ""


def supports_marlin(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None) -> bool | str:
    """Check for half types, compute capability 8 or later, groups of 32, 64, 128 or none; zero points need 4 bits."""
    if why := _why_not(x, weight, scale, zero, MARLIN_GROUPS, MARLIN_TILES):
        return why
    if capability(x.get_device()) < MARLIN_CAPABILITY:
        return f"compute capability {capability(x.get_device()) / 10} is below {MARLIN_CAPABILITY / 10}"
    if zero is not None and weight.dtype is not torch.uint8:
        return "the kernel has zero points with 4 bits only"
    if weight.dtype is FP8 and scale.shape[1] > 1:
        return "the kernel has one scale for a column of fp8"
    return True


@functools.cache
def _locks(index: int) -> int:
    """Return the number of locks for a GPU's processors."""
    return LOCKS * torch.cuda.get_device_properties(index).multi_processor_count


@torch.inference_mode(False)
def _with_locks(weight: Tensor, before: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """Return a weight in Marlin's order with separate locks, because streams may run concurrently."""
    numbers = packed_weights.marlin_numbers(weight, None if before is None else before[0])
    if before is not None:
        return numbers, before[1]
    return numbers, torch.zeros(_locks(weight.get_device()), dtype=torch.int32, device=weight.device)


def marlin(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.weight_only_linear`. Numbers become the half type before the product."""
    columns, inner = weight.shape[0], x.shape[-1]
    make_scales = packed_weights.marlin_float_scales if weight.dtype is FP8 else packed_weights.marlin_scales
    numbers = weight_forms.of(weight, MARLIN, _with_locks)
    scales = weight_forms.of(scale, MARLIN, make_scales)
    zeros = None if zero is None else weight_forms.of(zero, MARLIN, packed_weights.marlin_zeros)
    if numbers is None or scales is None or (zero is not None and zeros is None):
        raise NotSupported("a weight with a form that cannot be kept")
    rows = x.reshape(-1, inner).contiguous()
    if not rows.numel():
        return x.new_empty((*x.shape[:-1], columns))
    packed, locks = numbers
    kind = packed_weights.number_type(weight, zero is not None).code
    out: Tensor = torch.ops._C.marlin_gemm(
        rows,
        None,
        packed,
        None,
        scales,
        None,  # scales of quantized rows, and one scale for the whole weight
        None,
        zeros,
        locks,
        kind,
        rows.shape[0],
        columns,
        inner,
        False,  # no atomic additions
        True,  # sum partial results in float32
        False,  # zero points are integers
    )
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], columns)


def supports_machete(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None) -> bool | str:
    """Check for half types and integers without zero points, in groups of 64, of 128 or none."""
    if zero is not None:
        return "the kernel takes zero points multiplied by their scales"
    if weight.dtype is FP8:
        return "the kernel multiplies integers"
    return _why_not(x, weight, scale, zero, MACHETE_GROUPS, MACHETE_TILES) or True


_FOR_ROWS = {dtype: functools.partial(packed_weights.machete_numbers, dtype) for dtype in HALF_TYPES}


def machete(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.weight_only_linear`. Numbers become the half type before the product."""
    columns, inner = weight.shape[0], x.shape[-1]
    numbers = weight_forms.of(weight, MACHETE, _FOR_ROWS[x.dtype])
    scales = weight_forms.of(scale, MACHETE, packed_weights.by_groups)
    if numbers is None or scales is None:
        raise NotSupported("a weight with a form that cannot be kept")
    rows = x.reshape(-1, inner).contiguous()
    if not rows.numel():
        return x.new_empty((*x.shape[:-1], columns))
    kind = packed_weights.number_type(weight, False).code
    group = inner // scales.shape[0] if scales.shape[0] > 1 else -1
    out: Tensor = torch.ops._C.machete_mm(rows, numbers, kind, None, scales, None, group, None, None, None)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], columns)
