"""The cache write of vLLM's library, and FlashAttention 3 (Shah et al., arXiv 2407.08608) of vLLM and SGLang."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .limits import problem

LARGEST_HEAD = 256
LEAST_BLOCK = 16


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def supports_kv_cache_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool | str:
    """Check for one dtype, one size of keys and values, adjacent heads, and caches with the same strides."""
    if why := problem("key", key, contiguous=False):
        return why
    for name, tensor in (("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.dtype is not key.dtype:
            return f"{name} is {tensor.dtype}, not {key.dtype}"
    size = key.shape[2]
    if value.shape[2] != size:
        return f"values have {value.shape[2]} elements, keys {size}"
    if key.stride()[1:] != (size, 1) or value.stride()[1:] != (size, 1):
        return "the heads of key or value do not lie side by side"
    if key_cache.stride() != value_cache.stride() or key_cache.stride(3) != 1:
        return f"the caches have strides {key_cache.stride()} and {value_cache.stride()}"
    return True


def kv_cache_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :data:`fl_dispatch.ops.attention.kv_cache_write`."""
    if not slot_mapping.shape[0]:
        return
    one = _one(key.device)
    torch.ops._C_cache_ops.reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, "auto", one, one)


def supports_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> bool | str:
    """Check for half types, one head size of at most 256 elements, blocks of at least 16 tokens, no ALiBi."""
    if key_cache.shape[1] % LEAST_BLOCK:
        return f"the block size {key_cache.shape[1]} is not a multiple of {LEAST_BLOCK}"
    return supports_sglang_paged_attention(query, key_cache, value_cache, out, alibi_slopes, sinks)


def supports_sglang_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> bool | str:
    """Check for half types, one head size of at most 256 elements, blocks of any size, no ALiBi."""
    if why := problem("query", query, contiguous=False):
        return why
    if query.dtype is torch.float32:
        return "query is float32, not float16 or bfloat16"
    if key_cache.dtype is not query.dtype or value_cache.dtype is not query.dtype:
        return f"the caches are {key_cache.dtype} and {value_cache.dtype}, not {query.dtype}"
    size = query.shape[2]
    if size > LARGEST_HEAD or size % 8 or value_cache.shape[3] != size:
        return f"head sizes {size} and {value_cache.shape[3]}, not one multiple of 8 up to {LARGEST_HEAD}"
    strided = [
        tensor for tensor in (query, key_cache, value_cache, out) if tensor is not None and tensor.stride(-1) != 1
    ]
    if strided:
        return "the dimensions of a head do not lie side by side"
    if alibi_slopes is not None:
        return "FlashAttention 3 has no ALiBi"
    if sinks is not None and (sinks.dtype is not torch.bfloat16 or query.dtype is not torch.bfloat16):
        return "sinks must be bfloat16, as the query"
    return True


_TRAILING = (True, None, 0, None, 0)
"""Rotary interleaving, no scheduler metadata, automatic splits and packing, no processors held back."""


def _flash_attention(forward: Callable[..., object]) -> Callable[..., Tensor]:
    """Return the operator ``paged_attention``.

    Args:
        forward: takes the leading arguments that both libraries share, the soft cap, and the sinks.
    """

    def paged_attention(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        out: Tensor | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = torch.empty_like(query)
        if not seq_lens.shape[0] or not query.shape[0]:
            return out
        left = -1 if sliding_window is None else sliding_window - 1
        leading = (
            query,
            key_cache,
            value_cache,
            *(None, None, None),  # new keys, new values, and a second part of the query
            out,
            query_start_loc,
            *(None, None, None),  # starts of keys, starts of new keys, and numbers of used queries
            seq_lens,
            max_query_len,
            max_seq_len,
            block_table,
            *(None, None),  # reordering of the batch, padding on the left
            *(None, None, None),  # a rotary table for the kernel
            *(None, None, None),  # scales of quantized queries, keys, values
            scale,
            causal,
            left,
            0 if causal else left,
        )
        forward(leading, softcap, sinks)
        return out

    return paged_attention


@_flash_attention
def paged_attention(leading: tuple[Any, ...], softcap: float, sinks: Tensor | None) -> None:
    """Call vLLM's library, without context parallelism."""
    torch.ops._vllm_fa3_C.fwd(*leading, softcap, *_TRAILING, sinks, 1, 0, None)


@_flash_attention
def sglang_paged_attention(leading: tuple[Any, ...], softcap: float, sinks: Tensor | None) -> None:
    """Call SGLang's library, without chunked attention, block masks and queries of one part only."""
    torch.ops.sgl_kernel.fwd(*leading, 0, softcap, *_TRAILING, sinks, None, False)
