"""Attention over a paged cache in C++ of our own, for machines without the wheel's kernels, and for what they decline.

``attention.cpp`` takes every layout of a block whose keys lie token by token or dimension by dimension, and rounds once
on every processor. A row's result does not depend on the other rows of its batch.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_dispatch import cpp

SOURCE = Path(__file__).with_name("attention.cpp")
DTYPES = frozenset({torch.float32, torch.bfloat16})
STRIP = 16
"""Elements or tokens that are computed together; a head has whole strips, and so has a block."""


class _Call(ctypes.Structure):
    """``Call`` of ``attention.cpp``."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in (
            "query", "keys", "values", "table", "starts", "lengths", "out", "slopes", "sinks",
        )),
        *((name, ctypes.c_int64) for name in (
            "query_token", "query_head", "key_block", "key_token", "key_head", "key_dim", "value_block", "value_token",
            "value_head", "table_row", "rows", "requests", "blocks", "block_size", "heads", "kv_heads", "dim",
            "columns", "causal", "window", "threads",
        )),
        ("scale", ctypes.c_float), ("softcap", ctypes.c_float),
    ]  # fmt: skip


class _Write(ctypes.Structure):
    """``Write`` of ``attention.cpp``."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("key", "value", "keys", "values", "slots")),
        ("from_key", ctypes.c_int64 * 2), ("from_value", ctypes.c_int64 * 2),
        ("to_key", ctypes.c_int64 * 4), ("to_value", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("tokens", "blocks", "block_size", "heads", "key_dim", "value_dim")),
    ]  # fmt: skip


def why_unavailable() -> str:
    """Why the functions are not there, or an empty string."""
    return cpp.why_not(SOURCE)


def supports_kv_cache_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> bool | str:
    """Tensors of one dtype in main memory, in any strides, but for the elements of a new key or value."""
    if why := problem(key=key, value=value, key_cache=key_cache, value_cache=value_cache):
        return why
    if slot_mapping.dtype is not torch.int64 or not slot_mapping.is_cpu:
        return f"slot_mapping is {slot_mapping.dtype} on {slot_mapping.device}, not torch.int64 on the CPU"
    tokens = min(len(key), len(value))
    if len(slot_mapping) > tokens or key.shape[1:] != key_cache.shape[2:] or value.shape[1:] != value_cache.shape[2:]:
        return "there are fewer keys or values than slots, or other ones than the cache has"
    return True if key.stride(2) == value.stride(2) == 1 else "the elements of a head lie apart"


def kv_cache_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :data:`fl_dispatch.ops.attention.kv_cache_write`."""
    slots = slot_mapping.contiguous()
    blocks, block_size, heads, key_dim = key_cache.shape
    call = _Write(
        key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(),
        key.stride()[:2], value.stride()[:2], key_cache.stride(), value_cache.stride(),
        len(slots), blocks, block_size, heads, key_dim, value_cache.shape[3],
    )  # fmt: skip
    _run("kv_cache_write", call, key.element_size() == 2)


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
    if why := problem(query=query, key_cache=key_cache, value_cache=value_cache, out=query if out is None else out):
        return why
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    if head_dim % STRIP or value_cache.shape[3] != head_dim:
        return f"keys of {head_dim} and values of {value_cache.shape[3]} elements are not one multiple of {STRIP}"
    if query.shape[2] != head_dim or query.shape[1] % kv_heads or value_cache.shape[:3] != key_cache.shape[:3]:
        return "the heads of queries, keys and values do not belong together"
    by_token, by_dimension = key_cache.stride(3) == 1, key_cache.stride(1) == 1 and block_size % STRIP == 0
    if not (by_token or by_dimension) or value_cache.stride(3) != 1:
        return f"neither the elements of a head lie side by side nor a multiple of {STRIP} tokens of a block"
    if not causal and max_query_len > STRIP:
        return "queries see every key, which a product of matrices is faster for"
    if query.stride(2) != 1 or (out is not None and not out.is_contiguous()):
        return "the elements of a head lie apart, or out is not contiguous"
    numbers = block_table, query_start_loc, seq_lens
    if not all(each.dtype is torch.int32 and each.is_cpu for each in numbers):
        return "the block table or the lengths are not torch.int32 on the CPU"
    if len(query_start_loc) != len(seq_lens) + 1 or len(block_table) < len(seq_lens):
        return "there are not as many starts and tables as lengths"
    if out is not None and (len(out) < len(query) or out.shape[1:] != query.shape[1:]):
        return "out has not as many results as there are queries"
    if any(each is not None and len(each) != query.shape[1] for each in (alibi_slopes, sinks)):
        return "there are not as many slopes or sinks as heads"
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
    call = _Call(
        query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), block_table.data_ptr(), starts.data_ptr(),
        lengths.data_ptr(), out.data_ptr(), None if slopes is None else slopes.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        *query.stride()[:2], *key_cache.stride(), *value_cache.stride()[:3], block_table.stride(0),
        len(query), len(lengths), blocks, block_size, query.shape[1], kv_heads, head_dim, block_table.shape[1],
        causal, sliding_window or 0, torch.get_num_threads(), scale, softcap,
    )  # fmt: skip
    _run("paged_attention", call, query.dtype is torch.bfloat16)
    return out


def problem(**tensors: Tensor) -> str:
    """Why functions of ours do not take these tensors, which must have one dtype, or an empty string."""
    dtype = next(iter(tensors.values())).dtype
    for name, tensor in tensors.items():
        if not tensor.is_cpu:
            return f"{name} is on {tensor.device}, not on the CPU"
        if tensor.dtype not in DTYPES:
            return f"{name} is {tensor.dtype}, not float32 or bfloat16"
        if tensor.dtype is not dtype:
            return f"{name} is {tensor.dtype}, not {dtype}"
        if not tensor.numel():
            return f"{name} is empty"
    return ""


def _run(name: str, call: ctypes.Structure, half: bool) -> None:
    """Call a function.

    Raises:
        IndexError: a block or a slot lies outside of the cache or the table. Others may have been written before.
    """
    if _function(name)(ctypes.byref(call), half):
        raise IndexError(
            f"{name}: a row, a block or a slot lies outside of the queries, the cache or the table of blocks"
        )


@cache
def _function(name: str) -> Any:
    function = getattr(cpp.load(SOURCE), name)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return function
