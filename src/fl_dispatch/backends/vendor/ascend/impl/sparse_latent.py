"""Sparse latent attention by ``npu_lightning_indexer`` and ``npu_sparse_flash_attention``; index keys are scattered.

Both kernels take lengths as device tensors, so calls do not wait for the device. They take contiguous caches, with
latent and rotary parts in separate tensors. For other caches the blocks of a batch's requests are copied, or only the
listed latent rows if these are fewer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import ALL_KEYS, CAUSAL, without_skipped
from .limits import HALVES, problem
from .mla import BLOCK, COPIED_AT_ONCE, copied, problem_of_rows

WRITE = "npu_scatter_nd_update_"
INDEXER = "npu_lightning_indexer"
ATTENTION = "npu_sparse_flash_attention"
INDEX_DIM = 128
MOST_INDEX_HEADS = 64
COUNTS = frozenset((*range(1, 2049), *range(3072, 8193, 1024)))
"""Numbers of tokens that a query may list."""
BLOCK_UNIT, LARGEST_BLOCK = 16, 1024
ABSORBED = 2
"""The kernel's ``attention_mode`` for latent rows, its only mode."""
BEHIND = torch.iinfo(torch.int32).max
"""A position after all others."""


def supports_index_key_write(key: Tensor, key_cache: Tensor) -> bool | str:
    """Check for one dtype and a contiguous cache."""
    for name, tensor in (("key", key), ("key_cache", key_cache)):
        if why := problem(WRITE, name, tensor, like=key):
            return why
    return key_cache.is_contiguous() or "the blocks of the cache lie apart"


def index_key_write(key: Tensor, key_cache: Tensor, slot_mapping: Tensor, may_skip: bool | None = None) -> None:
    """See :data:`fl_dispatch.ops.sparse_mla.index_key_write`."""
    import torch_npu

    slots, new = without_skipped(slot_mapping, may_skip, key)
    if slots.shape[0]:
        rows = key_cache.view(-1, key_cache.shape[2])
        torch_npu.npu_scatter_nd_update_(rows, slots.contiguous().unsqueeze(1), new.contiguous())


def supports_index_topk(query: Tensor, key_cache: Tensor, topk: int) -> bool | str:
    """Check for half types, unquantized keys of 128 elements, and up to 64 heads."""
    for name, tensor in (("query", query), ("key_cache", key_cache)):
        if why := problem(INDEXER, name, tensor, HALVES, like=query):
            return why
    heads, dim = query.shape[1:]
    if dim != INDEX_DIM or heads > MOST_INDEX_HEADS:
        return f"{heads} index heads of {dim} elements; {INDEXER} takes up to {MOST_INDEX_HEADS} of {INDEX_DIM}"
    if topk not in COUNTS:
        return f"{topk} listed tokens; {INDEXER} takes up to 2,048, and multiples of 1,024 up to 8,192"
    if not _fits(key_cache) and BLOCK % key_cache.shape[1] and key_cache.shape[1] % BLOCK:
        return f"the block size {key_cache.shape[1]} neither divides {BLOCK} nor is a multiple of it"
    return True


def _fits(key_cache: Tensor) -> bool:
    """Whether the kernel takes a cache without a copy."""
    block_size = key_cache.shape[1]
    return key_cache.is_contiguous() and block_size % BLOCK_UNIT == 0 and block_size <= LARGEST_BLOCK


def index_topk(
    query: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    topk: int,
    out: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.sparse_mla.index_topk`. Sorts the lists, because the kernel's order is arbitrary."""
    tokens, requests = query.shape[0], block_table.shape[0]
    if not tokens or not requests:
        return query.new_full((tokens, topk), -1, dtype=torch.int32) if out is None else out
    longest = max(1, max_seq_len)
    together = max(1, COPIED_AT_ONCE // longest)
    if _fits(key_cache):
        listed = _list(query, weights, key_cache, block_table, query_start_loc, seq_lens, topk)
    elif requests <= together:
        listed = _list(query, weights, *copied(key_cache, block_table, longest), query_start_loc, seq_lens, topk)
    else:
        listed = query.new_full((tokens, topk), -1, dtype=torch.int32)
        row = torch.arange(tokens, dtype=torch.int32, device=query.device)
        for first in range(0, requests, together):
            part, start = slice(first, first + together), query_start_loc[first]
            turned = (row + start) % tokens  # a group's queries go first, because the CPU does not know its rows
            starts = query_start_loc[first : first + together + 1] - start
            copy, table = copied(key_cache, block_table[part], longest)
            found = _list(query[turned], weights[turned], copy, table, starts, seq_lens[part], topk)
            listed = torch.where((row >= start)[:, None], found[(row - start) % tokens], listed)
    ordered = listed.masked_fill(listed < 0, BEHIND).sort(dim=-1).values
    found = ordered.masked_fill(ordered == BEHIND, -1)
    return found if out is None else _covered_rows(out, found, query_start_loc)


def _list(
    query: Tensor, weights: Tensor, keys: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, topk: int
) -> Tensor:
    """Return the kernel's lists ``[tokens, topk]``; rows after the last request are arbitrary."""
    import torch_npu

    listed: Tensor = torch_npu.npu_lightning_indexer(
        query.contiguous(),
        keys.unsqueeze(2),
        weights.contiguous(),
        actual_seq_lengths_query=starts[1:].contiguous(),
        actual_seq_lengths_key=lengths.contiguous(),
        block_table=table.contiguous(),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=topk,
        sparse_mode=CAUSAL,
    )[0].squeeze(1)
    return listed


def _covered_rows(out: Tensor, found: Tensor, query_start_loc: Tensor) -> Tensor:
    """Copy the rows of requests from ``found`` to ``out``."""
    rows = torch.arange(out.shape[0], device=out.device).view(-1, *(1,) * (out.dim() - 1))
    return out.copy_(torch.where(rows < query_start_loc[-1], found, out))


def supports_mla_sparse(query: Tensor, kv_cache: Tensor, kv_lora_rank: int, query_rope: Tensor | None) -> bool | str:
    """Check for half types, and rows of 512 and 64 elements."""
    return problem_of_rows(ATTENTION, query, query_rope, kv_cache, kv_lora_rank) or True


def mla_sparse(
    query: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    kv_lora_rank: int,
    out: Tensor | None = None,
    query_rope: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.sparse_mla.mla_sparse`."""
    if query_rope is None:
        query, query_rope = query[..., :kv_lora_rank], query[..., kv_lora_rank:]
    (tokens, topk), (requests, columns) = positions.shape, block_table.shape
    if not tokens or not requests:
        return query.new_empty(query.shape) if out is None else out
    row = torch.arange(tokens, dtype=torch.int32, device=query.device)
    listed = positions.masked_fill((row >= query_start_loc[-1])[:, None], -1)
    parts: list[Tensor] = []
    longest = columns * kv_cache.shape[1]  # a host sizes its table for the longest context
    if requests * longest <= min(tokens * topk, max(longest, COPIED_AT_ONCE)):
        copy, table = copied(kv_cache, block_table, longest)
        lengths = torch.full((requests,), table.shape[1] * BLOCK, dtype=torch.int32, device=query.device)
        ends = query_start_loc[1:].contiguous()
        parts.append(_attend(query, query_rope, copy.unsqueeze(2), listed, ends, lengths, scale, table))
    else:
        request = torch.searchsorted(query_start_loc, row, right=True).sub_(1).clamp_(max=requests - 1)
        step, column = max(1, COPIED_AT_ONCE // topk), torch.arange(topk, dtype=torch.int32, device=query.device)
        for part in (slice(first, first + step) for first in range(0, tokens, step)):
            rows = _listed_rows(kv_cache, listed[part], block_table[request[part]])
            count = rows.shape[0] // topk
            ends = row[:count] + 1  # each query counts as a request
            places = column.expand(count, topk).masked_fill(listed[part] < 0, -1)
            parts.append(_attend(query[part], query_rope[part], rows.unsqueeze(1), places, ends, ends * topk, scale))
    found = torch.cat(parts).masked_fill((listed[:, :1] < 0)[..., None], 0)
    return found if out is None else _covered_rows(out, found, query_start_loc)


def _listed_rows(kv_cache: Tensor, listed: Tensor, table: Tensor) -> Tensor:
    """Return the rows ``[queries * topk, width]`` that each query lists; rows of negative positions are arbitrary."""
    block_size, position = kv_cache.shape[1], listed.clamp(min=0).long()
    blocks = table.gather(1, position // block_size).masked_fill(listed < 0, 0).long()
    return kv_cache[blocks, position % block_size].flatten(0, 1)


def _attend(
    query: Tensor,
    query_rope: Tensor,
    rows: Tensor,
    listed: Tensor,
    ends: Tensor,
    lengths: Tensor,
    scale: float,
    table: Tensor | None = None,
) -> Tensor:
    """Call the kernel on rows ``[..., 1, width]``: blocks of a table, or the rows of all requests in order."""
    import torch_npu

    rank = query.shape[-1]
    latents = rows[..., :rank].contiguous()
    result: Tensor = torch_npu.npu_sparse_flash_attention(
        query.contiguous(),
        latents,
        latents,
        listed.unsqueeze(1).contiguous(),
        scale,
        block_table=table,
        actual_seq_lengths_query=ends,
        actual_seq_lengths_kv=lengths,
        query_rope=query_rope.contiguous(),
        key_rope=rows[..., rank:].contiguous(),
        sparse_block_size=1,
        layout_query="TND",
        layout_kv="TND" if table is None else "PA_BSND",
        sparse_mode=ALL_KEYS,
        attention_mode=ABSORBED,
    )[0]
    return result
