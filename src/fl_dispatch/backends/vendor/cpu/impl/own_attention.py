"""Attention over a paged cache in C++ of our own, for machines without the wheel's kernels, and for what they decline.

``attention.cpp`` takes every layout of a block whose keys lie token by token or dimension by dimension, and rounds once
on every processor. A row's result does not depend on the other rows of its batch.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_dispatch import cpp

SOURCE = Path(__file__).with_name("attention.cpp")
DTYPES = frozenset({torch.float32, torch.bfloat16})
STRIP = 16
"""Elements or tokens that are computed together; a head has whole strips, and so has a block."""


def why_unavailable() -> str:
    """Why the functions are not there, or an empty string."""
    return cpp.why_not(SOURCE)


def supports_kv_cache_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> bool | str:
    """Tensors of one dtype in main memory, in any strides, but for the elements of a new key or value."""
    if why := _problem(key=key, value=value, key_cache=key_cache, value_cache=value_cache):
        return why
    if slot_mapping.dtype is not torch.int64:
        return f"slot_mapping is {slot_mapping.dtype}, not torch.int64"
    return True if key.stride(2) == value.stride(2) == 1 else "the elements of a head lie apart"


def kv_cache_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :data:`fl_dispatch.ops.attention.kv_cache_write`."""
    slots = slot_mapping.contiguous()
    numbers = (
        len(slots), *key_cache.shape, value_cache.shape[3], *key.stride()[:2], *value.stride()[:2],
        *key_cache.stride(), *value_cache.stride(),
    )  # fmt: skip
    addresses = (tensor.data_ptr() for tensor in (key, value, key_cache, value_cache, slots))
    _run("kv_cache_write", key.element_size() == 2, *addresses, _numbers(numbers))


def supports_paged_attention(
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
) -> bool | str:
    """One dtype, and keys and values of whole vectors, which lie in the cache side by side in one direction."""
    if why := _problem(query=query, key_cache=key_cache, value_cache=value_cache):
        return why
    block_size, head_dim = key_cache.shape[1], key_cache.shape[3]
    if head_dim % STRIP or value_cache.shape[3] != head_dim:
        return f"keys of {head_dim} and values of {value_cache.shape[3]} elements are not one multiple of {STRIP}"
    by_token, by_dimension = key_cache.stride(3) == 1, key_cache.stride(1) == 1 and block_size % STRIP == 0
    if not (by_token or by_dimension) or value_cache.stride(3) != 1:
        return f"neither the elements of a head lie side by side nor a multiple of {STRIP} tokens of a block"
    if not causal and max_query_len > STRIP:
        return "queries see every key, which a product of matrices is faster for"
    if query.stride(2) != 1 or (out is not None and not out.is_contiguous()):
        return "the elements of a head lie apart, or out is not contiguous"
    if not all(each.dtype is torch.int32 for each in (block_table, query_start_loc, seq_lens)):
        return "the block table or the lengths are not torch.int32"
    return True if block_table.stride(1) == 1 else "the columns of the block table lie apart"


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
    """See :data:`fl_dispatch.ops.attention.paged_attention`."""
    if out is None:
        out = query.new_empty(query.shape)
    starts, lengths = query_start_loc.contiguous(), seq_lens.contiguous()
    slopes, sinks = (None if each is None else each.float().contiguous() for each in (alibi_slopes, sinks))
    blocks, block_size, kv_heads, head_dim = key_cache.shape
    numbers = (
        *query.stride()[:2], *key_cache.stride(), *value_cache.stride()[:3], block_table.stride(0), blocks, block_size,
        query.shape[1], kv_heads, head_dim, block_table.shape[1], causal, sliding_window or 0,
    )  # fmt: skip
    tensors = query, key_cache, value_cache, block_table, starts, lengths, out, slopes, sinks
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    how = _numbers(numbers), scale, softcap, len(lengths), torch.get_num_threads()
    _run("paged_attention", query.dtype is torch.bfloat16, *addresses, *how)
    return out


def _problem(**tensors: Tensor) -> str:
    """Why the functions do not take these tensors, which must have one dtype, or an empty string."""
    dtype = next(iter(tensors.values())).dtype
    for name, tensor in tensors.items():
        if not tensor.is_cpu:
            return f"{name} is on {tensor.device}, not on the CPU"
        if tensor.dtype not in DTYPES:
            return f"{name} is {tensor.dtype}, not float32 or bfloat16"
        if tensor.dtype is not dtype:
            return f"{name} is {tensor.dtype}, not {dtype}"
    return ""


def _numbers(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _run(name: str, *arguments: Any) -> None:
    """Call a function.

    Raises:
        IndexError: a block or a slot lies outside of the cache or the table.
    """
    if _function(name)(*arguments):
        raise IndexError(f"{name}: a block or a slot lies outside of the cache or the table of blocks")


@cache
def _function(name: str) -> Any:
    function = getattr(cpp.load(SOURCE), name)
    pointers, numbers = {"paged_attention": (10, 2), "kv_cache_write": (6, 0)}[name]
    tail = [ctypes.c_double] * numbers + [ctypes.c_int64] * numbers
    function.argtypes, function.restype = [ctypes.c_int64, *[ctypes.c_void_p] * pointers, *tail], ctypes.c_int64
    return function
