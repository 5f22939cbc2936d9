"""Write keys and values into the paged cache, with one program a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.quantization import LARGEST, LEAST_SCALE

from ..launch import power_of_two
from ..rows.quantization import narrowed, quotient_of, unit_of


@triton.jit
def _quantized(new, SCALE, LARGEST: tl.constexpr):
    """Divide numbers by the scale and clamp them to the type's range; the division is exact to IEEE 754.

    The caller rounds, so an inexact quotient could be rounded to another number than the reference's.
    """
    quotient = tl.div_rn(new.to(tl.float32), SCALE + tl.zeros_like(new).to(tl.float32))
    return tl.clamp(quotient, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def stored(new, SCALE, LARGEST: tl.constexpr, TYPE: tl.constexpr):
    """Convert numbers to the cache's type; ``LARGEST``: the largest number of a quantized type, otherwise 0."""
    if LARGEST > 0:
        return narrowed(_quantized(new, SCALE, LARGEST), TYPE)
    else:
        return new.to(TYPE)


@triton.jit
def _write(
    key,
    value,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slots,
    KEY_TOKEN,
    KEY_HEAD,
    KEY_DIM,
    VALUE_TOKEN,
    VALUE_HEAD,
    VALUE_DIM,
    KEY_BLOCK,
    KEY_SLOT,
    KEY_CACHE_HEAD,
    KEY_CACHE_DIM,
    VALUE_BLOCK,
    VALUE_SLOT,
    VALUE_CACHE_HEAD,
    VALUE_CACHE_DIM,
    KEY_SCALES_BLOCK,
    KEY_SCALES_SLOT,
    KEY_SCALES_HEAD,
    VALUE_SCALES_BLOCK,
    VALUE_SCALES_SLOT,
    VALUE_SCALES_HEAD,
    SLOT_STRIDE,
    KEY_SCALE,
    VALUE_SCALE,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Grid: tokens. ``LARGEST``: the largest number of a quantized cache's type, otherwise 0.

    ``LEAST``: the least scale if each token and head has a scale (a cache in int8), otherwise 0.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_DIM)[None, :]
    column_v = tl.arange(0, BLOCK_DIM_V)[None, :]
    inside, inside_v = (head < HEADS) & (column < DIM), (head < HEADS) & (column_v < DIM_V)
    # All loads start before the slot has arrived, because only the stores need it.
    new = tl.load(key + token * KEY_TOKEN + head * KEY_HEAD + column * KEY_DIM, mask=inside, other=0.0)
    new_v = tl.load(value + token * VALUE_TOKEN + head * VALUE_HEAD + column_v * VALUE_DIM, mask=inside_v, other=0.0)
    if LEAST > 0:
        unit = unit_of(new.to(tl.float32), LARGEST, LEAST, 1)
        unit_v = unit_of(new_v.to(tl.float32), LARGEST, LEAST, 1)
        new = quotient_of(new.to(tl.float32), unit, LARGEST, True).to(key_cache.dtype.element_ty)
        new_v = quotient_of(new_v.to(tl.float32), unit_v, LARGEST, True).to(value_cache.dtype.element_ty)
    else:
        new = stored(new, KEY_SCALE, LARGEST, key_cache.dtype.element_ty)
        new_v = stored(new_v, VALUE_SCALE, LARGEST, value_cache.dtype.element_ty)
    slot = tl.load(slots + token * SLOT_STRIDE).to(tl.int64)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target = key_cache + block * KEY_BLOCK + place * KEY_SLOT + head * KEY_CACHE_HEAD
    target_v = value_cache + block * VALUE_BLOCK + place * VALUE_SLOT + head * VALUE_CACHE_HEAD
    there = slot + tl.zeros([1, 1], tl.int64) >= 0  # the interpreter takes no scalar as a mask
    inside, inside_v = inside & there, inside_v & there
    tl.store(target + column * KEY_CACHE_DIM, new, mask=inside)
    tl.store(target_v + column_v * VALUE_CACHE_DIM, new_v, mask=inside_v)
    if LEAST > 0:
        known = (head < HEADS) & there
        target = key_scales + block * KEY_SCALES_BLOCK + place * KEY_SCALES_SLOT + head * KEY_SCALES_HEAD
        target_v = value_scales + block * VALUE_SCALES_BLOCK + place * VALUE_SCALES_SLOT + head * VALUE_SCALES_HEAD
        tl.store(target, unit, mask=known)
        tl.store(target_v, unit_v, mask=known)


_launch = Launcher(_write)


def scale_strides(scales: Tensor | None) -> tuple[int, ...]:
    """Strides of the scales of an int8 cache; zeros without scales."""
    return (0, 0, 0) if scales is None else scales.stride()


def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float | None = None,
    value_scale: float | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """See :data:`fl_dispatch.ops.attention.kv_cache_write`. Declines float64 for a cache in int8."""
    tokens = slot_mapping.shape[0]
    if key_scales is not None and key.dtype is torch.float64:
        raise NotSupported("float64")
    if tokens == 0:
        return
    largest = LARGEST["int8"] if key_scales is not None else 0.0 if key_scale is None else LARGEST["float8_e4m3fn"]
    _, heads, dim = key.shape
    dim_v = value.shape[2]
    _launch(
        (tokens, 1, 1),
        (
            key,
            value,
            key_cache,
            value_cache,
            key if key_scales is None else key_scales,
            value if value_scales is None else value_scales,
            slot_mapping,
        ),
        (
            *key.stride(),
            *value.stride(),
            *key_cache.stride(),
            *value_cache.stride(),
            *scale_strides(key_scales),
            *scale_strides(value_scales),
            slot_mapping.stride(0),
            1.0 if key_scale is None else key_scale,
            1.0 if value_scale is None else value_scale,
            heads,
            dim,
            dim_v,
            key_cache.shape[1],
            power_of_two(heads),
            power_of_two(dim),
            power_of_two(dim_v),
            largest,
            0.0 if key_scales is None else LEAST_SCALE,
        ),
    )
