"""Write index keys into their paged cache, and quantize index queries as keys are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.quantization import FP8
from fl_dispatch.ops.sparse_mla import INDEX_GROUP

from ..launch import compiles, power_of_two
from ..rows.quantization import narrowed

LARGEST = tl.constexpr(448.0)
LEAST = tl.constexpr(1e-4)
MANTISSA = tl.constexpr(0x7FFFFF)
TOGETHER = 16
"""Query heads that a program quantizes."""


@triton.jit
def _unit_of(largest):
    """Return the scale of numbers with this largest magnitude, rounded up to a power of two.

    Adding a full mantissa carries into the exponent unless the number is a power of two already.
    """
    least = tl.maximum(largest, LEAST) / LARGEST
    return ((least.to(tl.int32, bitcast=True) + MANTISSA) & ~MANTISSA).to(tl.float32, bitcast=True)


@triton.jit
def _in_units(number, unit, TYPE: tl.constexpr):
    """Divide numbers by their scale, and convert them to a type of fp8."""
    return narrowed(tl.minimum(tl.maximum(number / unit, -LARGEST), LARGEST), TYPE)


@triton.jit
def _write(
    key,
    cache,
    slots,
    scales,
    KEY_TOKEN,
    KEY_DIM,
    CACHE_BLOCK,
    CACHE_SLOT,
    CACHE_DIM,
    SCALE_BLOCK,
    SCALE_SLOT,
    SCALE_GROUP,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: tokens, groups of ``BLOCK_D`` elements."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        dim = group * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = dim < DIM
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        x = tl.load(key + token * KEY_TOKEN + dim * KEY_DIM, mask=inside, other=0.0)
        target = cache + block * CACHE_BLOCK + offset * CACHE_SLOT + dim * CACHE_DIM
        if QUANTIZED:
            x = x.to(tl.float32)
            scale = _unit_of(tl.max(tl.abs(x), axis=0))
            number = _in_units(x, scale, cache.dtype.element_ty)
            tl.store(scales + block * SCALE_BLOCK + offset * SCALE_SLOT + group * SCALE_GROUP, scale)
        else:
            number = x.to(cache.dtype.element_ty)
        tl.store(target, number, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    query,
    weights,
    numbers,
    scaled,
    rows,
    QUERY_TOKEN,
    QUERY_HEAD,
    WEIGHT_TOKEN,
    WEIGHT_HEAD,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: groups of ``TOGETHER`` query heads; ``rows``: number of heads of all queries."""
    row = (tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)).to(tl.int64)
    exists = row < rows
    token, head = row // HEADS, row % HEADS
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = exists[:, None] & (dim < DIM)
    source = query + (token * QUERY_TOKEN + head * QUERY_HEAD)[:, None] + dim
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    unit = _unit_of(tl.max(tl.abs(x), axis=1))
    tl.store(numbers + row[:, None] * DIM + dim, _in_units(x, unit[:, None], numbers.dtype.element_ty), mask=inside)
    weight = tl.load(weights + token * WEIGHT_TOKEN + head * WEIGHT_HEAD, mask=exists, other=0.0).to(tl.float32)
    tl.store(scaled + row, weight * unit, mask=exists)


_launch = Launcher(_write)
_launch_quantize = Launcher(_quantize)


def supports(key_cache: Tensor) -> bool | str:
    """Whether kernels with the cache's dtype compile for the device."""
    return compiles(key_cache.dtype, key_cache.device)


def index_key_write(key: Tensor, key_cache: Tensor, slot_mapping: Tensor, key_scales: Tensor | None = None) -> None:
    """See :data:`fl_dispatch.ops.sparse_mla.index_key_write`. Declines float64."""
    if key.dtype is torch.float64:
        raise NotSupported("float64")
    tokens, dim = slot_mapping.shape[0], key.shape[1]
    if not tokens:
        return
    quantized = key_scales is not None
    block = INDEX_GROUP if quantized else power_of_two(dim)
    scales = key_cache if key_scales is None else key_scales
    _launch(
        (tokens, -(-dim // block), 1),
        (key, key_cache, slot_mapping, scales),
        (*key.stride(), *key_cache.stride(), *scales.stride(), dim, key_cache.shape[1], quantized, block),
        warps=1,
    )


def quantized_queries(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries ``[tokens, heads, dim]`` in fp8, and the weights of heads times the scales of their queries."""
    numbers = torch.empty(query.shape, dtype=FP8, device=query.device)
    scaled = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    rows, (heads, dim) = scaled.numel(), query.shape[1:]
    _launch_quantize(
        (-(-rows // TOGETHER), 1, 1),
        (query, weights, numbers, scaled),
        (query.stride(0), query.stride(1), *weights.stride(), heads, dim, TOGETHER, power_of_two(dim)),
        sizes=(rows,),
        warps=4,
    )
    return numbers, scaled
