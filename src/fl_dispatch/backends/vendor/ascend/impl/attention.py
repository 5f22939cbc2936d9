"""Attention over a paged cache, and the cache's writes.

``npu_fused_infer_attention_score`` (FIA) takes the batch's lengths as integers on the CPU. The caller passes them as
hints; a call without hints reads them from the device and waits for it once. Graphs cannot contain such calls, because
they would repeat the lengths of the captured batch.

This module also exports ``AscendAttentionBackend``, which vLLM's plugin defines. Accessing it imports vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_dispatch.backends.elsewhere import names_of

from .attention_mask import triangle
from .limits import HALVES, LARGEST_COUNT, problem

__getattr__ = names_of("vllm_fl.attention_ascend", "AscendAttentionBackend")

BACKEND = f"{__name__}.AscendAttentionBackend"
MLA_BACKEND = "vllm_fl.attention.mla.MLAFLBackend"
KV_LAYOUT = "(NHD|NHD)"
"""All keys of a layer, then all values, each contiguous: slots (N), heads and dimensions of a block in this order."""
BLOCK_MULTIPLE = 128
REQUIRES = {"kv_layout": KV_LAYOUT, "kv_block_multiple": BLOCK_MULTIPLE}
LARGEST_BLOCK = 512
HEAD_SIZES = (128, 192)
MOST_HEADS = 256
MOST_HEADS_A_GROUP = 64
LARGEST_ROW = 65535
"""Most elements of a slot, over all heads."""
MOST_REQUESTS = 4096
ALL_KEYS = 0
"""The kernel's ``sparse_mode`` for queries that see all keys."""
CAUSAL = 3
"""The kernel's ``sparse_mode`` for queries that see the keys up to their own position. Positions count from a request's
last query and last key.
"""
BAND = 4
"""The kernel's ``sparse_mode`` for queries that see a window of keys; positions count as for ``CAUSAL``."""


def attention_backend(use_mla: bool = False) -> str:
    """See :data:`fl_dispatch.ops.attention.attention_backend`."""
    return MLA_BACKEND if use_mla else BACKEND


# -- writing ----------------------------------------------------------------------------------------------------------


def supports_kv_cache_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool | str:
    """Check for one dtype, and for two contiguous caches or the two parts of contiguous latent rows."""
    kernel = "npu_scatter_pa_kv_cache"
    if why := problem(kernel, "key", key):
        return why
    for name, tensor in (("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        if why := problem(kernel, name, tensor, like=key):
            return why
    if (key_cache.is_contiguous() and value_cache.is_contiguous()) or _latent_rows(key_cache, value_cache) is not None:
        return True
    return f"the caches are neither contiguous (layout {KV_LAYOUT}) nor two parts of latent rows"


def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    may_skip: bool | None = None,
) -> None:
    """See :data:`fl_dispatch.ops.attention.kv_cache_write`.

    The kernel cannot skip slots. Unless the caller says that none is skipped, this waits for the device once.
    """
    import torch_npu

    slot_mapping, key, value = without_skipped(slot_mapping, may_skip, key, value)
    if not slot_mapping.shape[0]:
        return
    rows = None if key_cache.is_contiguous() and value_cache.is_contiguous() else _latent_rows(key_cache, value_cache)
    if rows is not None:
        new = torch.cat((key, value), dim=-1).flatten(1)
        torch_npu.npu_scatter_nd_update_(rows, slot_mapping.contiguous().unsqueeze(1), new)
        return
    torch_npu.npu_scatter_pa_kv_cache(
        key.contiguous(), value.contiguous(), key_cache, value_cache, slot_mapping.contiguous(), cache_mode="Norm"
    )


def without_skipped(slot_mapping: Tensor, may_skip: bool | None, *rows: Tensor) -> list[Tensor]:
    """Return the slots to write, and the rows of their tokens; waits for the device if slots may be skipped.

    The kernels cannot skip slots.
    """
    tokens = slot_mapping.shape[0]
    taken = [slot_mapping, *(row[:tokens] for row in rows)]
    if may_skip is False:
        return taken
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    return taken if kept.shape[0] == tokens else [one[kept] for one in taken]


def _latent_rows(key_cache: Tensor, value_cache: Tensor) -> Tensor | None:
    """Return the rows ``[slots, width]`` of a latent cache with these views as its two parts, or ``None``."""
    blocks, block_size, heads, size = key_cache.shape
    width = size + value_cache.shape[3]
    strides = (block_size * width, width, width, 1)
    parts = (key_cache, value_cache)
    if heads != 1 or any((part.stride(0), part.stride(1), part.stride(3)) != (*strides[:2], 1) for part in parts):
        return None
    if value_cache.storage_offset() != key_cache.storage_offset() + size:
        return None
    if value_cache.untyped_storage().data_ptr() != key_cache.untyped_storage().data_ptr():
        return None
    return key_cache.as_strided((blocks * block_size, width), (width, 1))


# -- attending --------------------------------------------------------------------------------------------------------


def supports_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    seq_lens: Tensor,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> bool | str:
    """Check for half types, contiguous caches of one shape, blocks of 128 to 512 tokens; no soft cap, ALiBi, sinks."""
    kernel = "npu_fused_infer_attention_score"
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        if why := problem(kernel, name, tensor, HALVES, like=query):
            return why
    asked = {"a soft cap": softcap > 0, "ALiBi": alibi_slopes is not None, "sinks": sinks is not None}
    for feature, wanted in asked.items():
        if wanted:
            return f"{kernel} has no parameter for {feature}"
    if seq_lens.shape[0] > MOST_REQUESTS:
        return f"{seq_lens.shape[0]} requests; {kernel} takes at most {MOST_REQUESTS}"
    return _heads_problem(query, key_cache) or _cache_problem(key_cache, value_cache) or True


def _heads_problem(query: Tensor, key_cache: Tensor) -> str:
    heads, size, kv_heads = query.shape[1], query.shape[2], key_cache.shape[2]
    if size not in HEAD_SIZES:
        return f"head size {size} is not one of {', '.join(map(str, HEAD_SIZES))}, which layout TND is documented for"
    if heads > MOST_HEADS or heads > kv_heads * MOST_HEADS_A_GROUP:
        return f"{heads} heads over {kv_heads}; at most {MOST_HEADS}, and {MOST_HEADS_A_GROUP} for each key-value head"
    if kv_heads * size > LARGEST_ROW:
        return f"{kv_heads} key-value heads of {size} elements are more than {LARGEST_ROW} elements a slot"
    return ""


def _cache_problem(key_cache: Tensor, value_cache: Tensor) -> str:
    block_size = key_cache.shape[1]
    if block_size % BLOCK_MULTIPLE or block_size > LARGEST_BLOCK:
        return f"block size {block_size} is not a multiple of {BLOCK_MULTIPLE} up to {LARGEST_BLOCK}"
    if value_cache.shape != key_cache.shape:
        return f"values have {value_cache.shape[3]} elements, keys {key_cache.shape[3]}; the kernel takes one size"
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        return f"the cache layout is not {KV_LAYOUT}: keys or values are not contiguous"
    if key_cache.numel() > LARGEST_COUNT:
        return f"the keys of a layer are {key_cache.numel()} elements; the kernel counts to {LARGEST_COUNT}"
    return ""


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
    query_start_loc_host: Sequence[int] | None = None,
    seq_lens_host: Sequence[int] | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.attention.paged_attention`."""
    import torch_npu

    if query_start_loc_host is None or seq_lens_host is None:
        query_start_loc_host, seq_lens_host = from_device(query_start_loc, seq_lens)
    ends = without_padding(query_start_loc_host)
    requests, rows = len(ends), ends[-1] if ends else 0
    if not rows:
        return query.new_empty(query.shape) if out is None else out
    queries, table = query[:rows], block_table[:requests]
    bounds = _bounds(causal, sliding_window, query.device)
    single = sliding_window is not None and ends == list(range(1, requests + 1))
    if single:
        # The kernel ignores the window if each request has one query, so queries are doubled and first results dropped.
        queries, ends = queries.repeat_interleave(2, dim=0), [2 * end for end in ends]
    if sliding_window is not None:
        # The kernel reads the whole table. Entries before the window are arbitrary.
        table = table.clamp(0, key_cache.shape[0] - 1)
    result: Tensor = torch_npu.npu_fused_infer_attention_score(
        queries.contiguous(),
        key_cache.flatten(2),
        value_cache.flatten(2),
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=list(seq_lens_host[:requests]),
        block_table=table.to(torch.int32).contiguous(),
        num_heads=query.shape[1],
        num_key_value_heads=key_cache.shape[2],
        scale=scale,
        input_layout="TND",
        block_size=key_cache.shape[1],
        **bounds,
    )[0]
    result = result[1::2] if single else result
    if out is None and rows == query.shape[0]:
        return result.contiguous()
    out = query.new_empty(query.shape) if out is None else out
    out[:rows] = result
    return out


def _bounds(causal: bool, sliding_window: int | None, device: torch.device) -> dict[str, Any]:
    """Return the kernel's arguments for the mask."""
    if sliding_window is not None:
        before, behind = sliding_window - 1, 0 if causal else sliding_window - 1
        return {"sparse_mode": BAND, "atten_mask": triangle(device), "pre_tokens": before, "next_tokens": behind}
    return {"sparse_mode": CAUSAL, "atten_mask": triangle(device)} if causal else {"sparse_mode": ALL_KEYS}


def from_device(*lengths: Tensor) -> list[list[int]]:
    """Copy tensors of lengths to integers on the CPU, which waits for the device once."""
    numbers: list[int] = torch.cat(lengths).tolist()
    parts, first = [], 0
    for tensor in lengths:
        parts.append(numbers[first : first + len(tensor)])
        first += len(tensor)
    return parts


def without_padding(starts: Sequence[int]) -> list[int]:
    """Return the row after each request, without the empty requests at the end with which hosts pad batches."""
    ends = list(starts[1:])
    while ends and ends[-1] == (ends[-2] if len(ends) > 1 else starts[0]):
        ends.pop()
    return ends
