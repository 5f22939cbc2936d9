"""Write index keys into their paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.sparse_mla import INDEX_GROUP

from ..launch import compiles, power_of_two
from ..rows.quantization import narrowed

LARGEST = tl.constexpr(448.0)
LEAST = tl.constexpr(1e-4)
MANTISSA = tl.constexpr(0x7FFFFF)


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
            least = tl.maximum(tl.max(tl.abs(x), axis=0), LEAST) / LARGEST
            # The least power of two that is not below: the mantissa's bits carry into the exponent.
            bits = (least.to(tl.int32, bitcast=True) + MANTISSA) & ~MANTISSA
            scale = bits.to(tl.float32, bitcast=True)
            number = narrowed(tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST), cache.dtype.element_ty)
            tl.store(scales + block * SCALE_BLOCK + offset * SCALE_SLOT + group * SCALE_GROUP, scale)
        else:
            number = x.to(cache.dtype.element_ty)
        tl.store(target, number, mask=inside)


_launch = Launcher(_write)


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
