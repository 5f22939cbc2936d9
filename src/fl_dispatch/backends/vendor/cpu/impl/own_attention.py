"""Paged attention in this project's C++, for machines without the wheel's kernels and for calls that they decline.

``attention.cpp`` takes every layout of a block with keys contiguous by token or by dimension, and rounds once on every
processor. A row's result does not depend on the other rows of its batch.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from fl_dispatch import cpp, native
from fl_dispatch.types import Traits

from .attention import KV_LAYOUT
from .native_calls import function, structure

SOURCE = Path(__file__).with_name("attention.cpp")
DTYPES = frozenset({torch.float32, torch.bfloat16})
STRIP = 16
"""Elements or tokens that are computed together; heads and blocks consist of whole strips."""
TRAITS = Traits(kv_layout=KV_LAYOUT, kv_block=STRIP, batch_invariant=True)


_Call = structure(
    "query keys values table starts lengths out slopes sinks",
    "query_token query_head key_block key_token key_head key_dim value_block value_token value_head table_row rows "
    "requests blocks block_size heads kv_heads dim columns causal window threads",
    "scale softcap",
)
"""``Call`` of ``attention.cpp``."""
_Write = structure(
    "key value keys values slots",
    "key_token key_head value_token value_head keys_block keys_slot keys_head keys_dim values_block values_slot "
    "values_head values_dim tokens blocks block_size heads key_dim value_dim",
)
"""``Write`` of ``attention.cpp``."""


def why_unavailable() -> str:
    """Return why the functions are unavailable, or an empty string."""
    return cpp.why_not(SOURCE)


def supports_kv_cache_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> bool | str:
    """Check for CPU tensors of one dtype; strides are arbitrary, except within the heads of new keys and values."""
    return _why_no_write(key, value, key_cache, value_cache, slot_mapping) or True


def _why_no_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> str:
    """Return why the function cannot take these, or an empty string."""
    if not _alike(key, value, key_cache, value_cache):
        return problem(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    if slot_mapping.dtype is not torch.int64 or not slot_mapping.is_cpu:
        return f"slot_mapping is {slot_mapping.dtype} on {slot_mapping.device}, not torch.int64 on the CPU"
    if not (key.dim() == value.dim() == 3 and key_cache.dim() == value_cache.dim() == 4 and slot_mapping.dim() == 1):
        return "keys and values have not 3 dimensions, their caches 4, and slots 1"
    (tokens, heads, dim), (others, value_heads, value_dim) = key.shape, value.shape
    blocks, slots, *of_keys = key_cache.shape
    value_blocks, value_slots, *of_values = value_cache.shape
    if slot_mapping.numel() > min(tokens, others) or of_keys != [heads, dim] or of_values != [value_heads, value_dim]:
        return "there are fewer keys or values than slots, or other ones than the cache has"
    if blocks != value_blocks or slots != value_slots or heads != value_heads:
        return "the caches of keys and of values have different blocks or heads"
    return "" if key.stride()[2] == value.stride()[2] == 1 else "the elements of a head lie apart"


def kv_cache_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :data:`fl_dispatch.ops.attention.kv_cache_write`.

    Raises:
        IndexError: a slot lies outside the cache. Earlier slots may have been written.
    """
    native.require(_why_no_write(key, value, key_cache, value_cache, slot_mapping))
    slots = slot_mapping.contiguous()
    blocks, block_size, heads, key_dim = key_cache.shape
    read_key, read_value, numbers, *caches = native.addresses((key, value, slots), (key_cache, value_cache))
    call = _Write(
        read_key, read_value, *caches, numbers,
        *key.stride()[:2], *value.stride()[:2], *key_cache.stride(), *value_cache.stride(), slots.numel(),
        blocks, block_size, heads, key_dim, value_cache.shape[3],
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
    out: Tensor | None = None,
    causal: bool = True,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> bool | str:
    """Check for one dtype, and keys and values of whole vectors that are contiguous along one axis of the cache."""
    if not causal and max_query_len > STRIP:
        return "queries see every key, which a product of matrices is faster for"
    return (
        _why_no_attention(
            query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out, alibi_slopes, sinks
        )
        or True
    )


def _why_no_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> str:
    """Return why the function cannot take these, or an empty string."""
    into = query if out is None else out
    if not _alike(query, key_cache, value_cache, into):
        return problem(query=query, key_cache=key_cache, value_cache=value_cache, out=into)
    if not (query.dim() == 3 and key_cache.dim() == value_cache.dim() == 4 and block_table.dim() == 2):
        return "queries have not 3 dimensions, the caches 4, and the block table 2"
    (rows, heads, dim), keys, values = query.shape, key_cache.shape, value_cache.shape
    block_size, kv_heads, head_dim = keys[1], keys[2], keys[3]
    if head_dim % STRIP or values[3] != head_dim:
        return f"keys of {head_dim} and values of {values[3]} elements are not one multiple of {STRIP}"
    if dim != head_dim or heads % kv_heads or values != keys:
        return "the heads of queries, keys and values do not belong together"
    _, token, _, element = key_cache.stride()
    if not (element == 1 or (token == 1 and block_size % STRIP == 0)) or value_cache.stride()[3] != 1:
        return f"neither the elements of a head lie side by side nor a multiple of {STRIP} tokens of a block"
    if query.stride()[2] != 1 or (out is not None and not out.is_contiguous()):
        return "the elements of a head lie apart, or out is not contiguous"
    for each in (block_table, query_start_loc, seq_lens):
        if each.dtype is not torch.int32 or not each.is_cpu:
            return "the block table or the lengths are not torch.int32 on the CPU"
    requests = seq_lens.numel()
    if seq_lens.dim() != 1 or query_start_loc.shape != (requests + 1,) or block_table.shape[0] < requests:
        return "there are not as many starts and tables as lengths"
    if out is not None and (out.dim() != 3 or out.shape[0] < rows or out.shape[1:] != (heads, dim)):
        return "out has not as many results as there are queries"
    for factors in (alibi_slopes, sinks):
        if factors is not None and (factors.shape != (heads,) or not factors.is_cpu):
            return "there are not as many slopes or sinks as heads, on the CPU"
    return "" if block_table.stride()[1] == 1 else "the columns of the block table lie apart"


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
    """See :data:`fl_dispatch.ops.attention.paged_attention`.

    Raises:
        IndexError: a start lies outside the queries, or a block outside the cache or the table.
    """
    native.require(
        _why_no_attention(
            query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out, alibi_slopes, sinks
        )
    )
    if out is None:
        out = query.new_empty(query.shape)
    starts, lengths = query_start_loc.contiguous(), seq_lens.contiguous()
    slopes, sinks = (None if each is None else each.float().contiguous() for each in (alibi_slopes, sinks))
    blocks, block_size, kv_heads, head_dim = key_cache.shape
    rows, heads, _ = query.shape
    *read, slope, sink, to = native.addresses(
        (query, key_cache, value_cache, block_table, starts, lengths, slopes, sinks), (out,)
    )
    call = _Call(
        *read, to, slope, sink,
        *query.stride()[:2], *key_cache.stride(), *value_cache.stride()[:3], block_table.stride()[0],
        rows, lengths.shape[0], blocks, block_size, heads, kv_heads, head_dim, block_table.shape[1],
        causal, sliding_window or 0, torch.get_num_threads(), scale, softcap,
    )  # fmt: skip
    _run("paged_attention", call, query.dtype is torch.bfloat16)
    return out


def _alike(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> bool:
    """Whether :func:`problem` finds nothing, in a third of its time."""
    return (
        a.dtype in DTYPES and a.dtype is b.dtype is c.dtype is d.dtype
        and a.is_cpu and b.is_cpu and c.is_cpu and d.is_cpu
        and 0 not in (a.numel(), b.numel(), c.numel(), d.numel())
    )  # fmt: skip


def problem(**tensors: Tensor) -> str:
    """Return why this project's functions do not take these tensors, which must share a dtype, or an empty string."""
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
        IndexError: a block or a slot lies outside the cache or the table. Earlier ones may have been written.
    """
    if function(SOURCE, name)(ctypes.byref(call), half):
        raise IndexError(
            f"{name}: a row, a block or a slot lies outside of the queries, the cache or the table of blocks"
        )
