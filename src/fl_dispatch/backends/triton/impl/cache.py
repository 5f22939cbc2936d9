"""Writing keys and values into the paged cache: one program a token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher, power_of_two


@triton.jit
def _copy(
    source,
    target,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SOURCE_HEAD,
    SOURCE_DIM,
    TARGET_HEAD,
    TARGET_DIM,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (head < HEADS) & (column < DIM)
    new = tl.load(source + head * SOURCE_HEAD + column * SOURCE_DIM, mask=inside)
    tl.store(target + head * TARGET_HEAD + column * TARGET_DIM, new.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _write(
    key,
    value,
    key_cache,
    value_cache,
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
    SLOT_STRIDE,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * SLOT_STRIDE).to(tl.int64)
    if slot >= 0:
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        _copy(
            key + token * KEY_TOKEN, key_cache + block * KEY_BLOCK + place * KEY_SLOT, HEADS, DIM,
            KEY_HEAD, KEY_DIM, KEY_CACHE_HEAD, KEY_CACHE_DIM, BLOCK_HEADS, BLOCK_DIM,
        )  # fmt: skip
        _copy(
            value + token * VALUE_TOKEN, value_cache + block * VALUE_BLOCK + place * VALUE_SLOT, HEADS, DIM_V,
            VALUE_HEAD, VALUE_DIM, VALUE_CACHE_HEAD, VALUE_CACHE_DIM, BLOCK_HEADS, BLOCK_DIM_V,
        )  # fmt: skip


_launch = Launcher(_write)


def kv_cache_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :data:`fl_dispatch.ops.attention.kv_cache_write`."""
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    _, heads, dim = key.shape
    dim_v = value.shape[2]
    _launch(
        (tokens, 1, 1),
        (key, value, key_cache, value_cache, slot_mapping),
        (
            *key.stride(),
            *value.stride(),
            *key_cache.stride(),
            *value_cache.stride(),
            slot_mapping.stride(0),
            heads,
            dim,
            dim_v,
            key_cache.shape[1],
            power_of_two(heads),
            power_of_two(dim),
            power_of_two(dim_v),
        ),
    )
