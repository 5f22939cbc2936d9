"""Attention of long prompts by the processor's matrix unit, on copies of their keys and values.

This variant of the kernel reads bfloat16 in an order that strides cannot describe. The cache therefore stays in the
order that every implementation reads, and a call with many tokens for each key copies its keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import library

TILES = "amx"
"""The kernels' name of the variant."""
LEAST = 64
"""Tokens for each copied key from which the copy pays (``benchmarks/products_cpu.py``)."""
MOST = 1 << 28
"""Elements that a call copies at most: 512 MiB. Beyond that, the cache is read as it is."""
BLOCK = 128
"""Keys of a block in the copies."""
VECTOR = 32
"""Number that divides a head's size."""
AT_ONCE = 4096
"""Keys that are gathered at a time."""


def may_pay(query: Tensor, max_query_len: int) -> bool:
    """Whether :func:`pays` must be asked: a decode, another dtype or another processor needs no look at lengths."""
    return (
        max_query_len >= LEAST
        and query.dtype is torch.bfloat16
        and query.shape[2] % VECTOR == 0
        and library.has_tiles()
    )


def pays(kv_heads: int, head_dim: int, starts: Sequence[int], lengths: Sequence[int], window: int) -> bool:
    """Whether the matrix unit saves more time than the copies take, and they are not too large.

    Args:
        kv_heads, head_dim: sizes of the cache.
        starts: ``[requests + 1]``; the first token of each request.
        lengths: ``[requests]``; keys of each request.
        window: keys that a token sees before itself, or -1.
    """
    copied, seen = sum(lengths), 0
    for place, length in enumerate(lengths):
        tokens = starts[place + 1] - starts[place]
        seen += tokens * (length if window < 0 else min(length, window + tokens))
    return 0 < LEAST * copied <= seen and 2 * copied * kv_heads * head_dim <= MOST


def copies(
    key_cache: Tensor, value_cache: Tensor, block_table: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy the keys and values of requests; the rest of their last blocks is zero.

    Args:
        key_cache, value_cache: ``[blocks, block_size, kv_heads, head_dim]`` bfloat16, of any strides.
        block_table: ``[requests, blocks]`` int32.
        lengths: ``[requests]``; keys of each request.

    Returns:
        Keys and values ``[blocks, kv_heads, BLOCK, head_dim]`` in the unit's order, and their block table.
    """
    _, block_size, kv_heads, head_dim = key_cache.shape
    counts = [-(-length // BLOCK) for length in lengths]
    keys, values = (key_cache.new_zeros((sum(counts), kv_heads, BLOCK, head_dim)) for _ in range(2))
    table = torch.zeros((len(counts), max(counts, default=0)), dtype=torch.int32)
    at_once, first = max(1, AT_ONCE // block_size), 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        torch.arange(first, first + count, out=table[row, :count])
        blocks = block_table[row, : -(-length // block_size)]
        for part, some in enumerate(torch.split(blocks, at_once) if length else ()):
            begin = part * at_once * block_size
            there = min(len(some) * block_size, length - begin)
            slots = torch.arange(there) + (first * BLOCK + begin)
            key, value = (cache[some].contiguous().flatten(0, 1)[:there] for cache in (key_cache, value_cache))
            torch.ops._C.cpu_attn_reshape_and_cache(key, value, keys, values, slots, TILES, 1.0, 1.0, "auto")
        first += count
    return keys, values, table
