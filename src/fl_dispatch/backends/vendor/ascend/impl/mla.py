"""Multi-head latent attention by ``npu_fused_infer_attention_score_v2``.

The kernel takes a latent cache as two tensors, the latent part and the rotary part. Hosts store both in one row, so
decode first copies the blocks of a batch's requests, a bounded number of tokens at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_dispatch.errors import NotSupported

from .attention import ALL_KEYS, CAUSAL, MOST_HEADS, MOST_REQUESTS, from_device, without_padding
from .attention_mask import triangle
from .limits import HALVES, problem

KERNEL = "npu_fused_infer_attention_score_v2"
RANK = 512
"""Elements of a row without its rotary part."""
ROPE = 64
"""Elements of a row's rotary part."""
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_QUERIES = 16
"""Most queries of a request over a latent cache; more are passed as several requests over the same blocks."""
BLOCK = 128
"""Tokens of a block in the copy."""
COPIED_AT_ONCE = 1 << 17
"""Most tokens that are copied at a time; a longer request is copied alone."""
PREFILL_SIZES = ((192, 128), (192, 192), (128, 128))
"""Elements of keys and values in the multi-head form."""


def supports_mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    kv_lora_rank: int,
    causal: bool,
    query_rope: Tensor | None,
) -> bool | str:
    """Check for half types, and rows of 512 and 64 elements."""
    if why := problem_of_rows(KERNEL, query, query_rope, kv_cache, kv_lora_rank):
        return why
    if not causal and max_query_len > 1:
        return "several queries of a request that see all keys"
    if seq_lens.shape[0] > MOST_REQUESTS:
        return f"{seq_lens.shape[0]} requests; {KERNEL} takes at most {MOST_REQUESTS}"
    return True


def problem_of_rows(kernel: str, query: Tensor, query_rope: Tensor | None, kv_cache: Tensor, kv_lora_rank: int) -> str:
    """Return why a kernel cannot take these queries and latent rows, or an empty string."""
    for name, tensor in (("query", query), ("query_rope", query_rope), ("kv_cache", kv_cache)):
        if tensor is not None and (why := problem(kernel, name, tensor, HALVES, like=query)):
            return why
    if (kv_lora_rank, kv_cache.shape[2] - kv_lora_rank) != (RANK, ROPE):
        return f"rows of {kv_lora_rank} and {kv_cache.shape[2] - kv_lora_rank} elements, not of {RANK} and {ROPE}"
    if query.shape[1] not in HEADS:
        return f"{query.shape[1]} heads, not one of {', '.join(map(str, HEADS))}"
    if BLOCK % kv_cache.shape[1] and kv_cache.shape[1] % BLOCK:
        return f"the block size {kv_cache.shape[1]} neither divides {BLOCK} nor is a multiple of it"
    return ""


def mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    kv_lora_rank: int,
    out: Tensor | None = None,
    causal: bool = True,
    query_rope: Tensor | None = None,
    query_start_loc_host: Sequence[int] | None = None,
    seq_lens_host: Sequence[int] | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.mla.mla_decode`."""
    import torch_npu

    if query_rope is None:
        query, query_rope = query[..., :kv_lora_rank], query[..., kv_lora_rank:]
    if query_start_loc_host is None or seq_lens_host is None:
        query_start_loc_host, seq_lens_host = from_device(query_start_loc, seq_lens)
    ends = without_padding(query_start_loc_host)
    starts, lengths = query_start_loc_host[: len(ends)], seq_lens_host[: len(ends)]
    if out is None:
        out = query.new_empty((*query.shape[:2], kv_lora_rank))
    for first, last in _parts(lengths):
        if starts[first] == ends[last - 1]:
            continue
        copy, table = copied(kv_cache, block_table[first:last], max(1, *lengths[first:last]))
        latents = copy[..., :kv_lora_rank].contiguous()  # keys and values
        rope = copy[..., kv_lora_rank:].contiguous()
        pieces = _pieces(starts[first:last], ends[first:last], lengths[first:last])
        for batch in (pieces[at : at + MOST_REQUESTS] for at in range(0, len(pieces), MOST_REQUESTS)):
            rows = slice(batch[0].start, batch[-1].end)
            if rows.start == rows.stop:
                continue
            several = causal and any(piece.end - piece.start > 1 for piece in batch)
            result, _ = torch_npu.npu_fused_infer_attention_score_v2(
                query[rows].contiguous(),
                latents,
                latents,
                query_rope=query_rope[rows].contiguous(),
                key_rope=rope,
                atten_mask=triangle(query.device) if several else None,
                actual_seq_qlen=[piece.end - rows.start for piece in batch],
                actual_seq_kvlen=[piece.keys for piece in batch],
                block_table=_rows_of(table, [piece.request for piece in batch]),
                num_query_heads=query.shape[1],
                num_key_value_heads=1,
                softmax_scale=scale,
                input_layout="TND",
                sparse_mode=CAUSAL if several else ALL_KEYS,
                block_size=BLOCK,
            )
            out[rows] = result
    return out


class _Piece(NamedTuple):
    """Adjacent queries of a request: rows from ``start`` to ``end``; the last one sees ``keys`` keys."""

    request: int
    start: int
    end: int
    keys: int


def _pieces(starts: Sequence[int], ends: Sequence[int], lengths: Sequence[int]) -> list[_Piece]:
    """Split requests into pieces of at most :data:`MOST_QUERIES` queries; one piece for a request without queries."""
    pieces = []
    for request, (start, end, length) in enumerate(zip(starts, ends, lengths, strict=True)):
        for row in range(start, max(end, start + 1), MOST_QUERIES):
            last = min(row + MOST_QUERIES, end)
            pieces.append(_Piece(request, row, last, length - (end - last)))
    return pieces


def _rows_of(table: Tensor, requests: Sequence[int]) -> Tensor:
    """Return the table's rows of these requests; the table itself if each request has one piece."""
    if list(requests) == list(range(table.shape[0])):
        return table
    return table.index_select(0, torch.tensor(requests, dtype=torch.int32, device=table.device))


def _parts(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return ranges of requests; padded to equal lengths, a range has at most :data:`COPIED_AT_ONCE` tokens."""
    first = longest = 0
    for request, length in enumerate(lengths):
        longest = max(longest, length)
        if request > first and longest * (request + 1 - first) > COPIED_AT_ONCE:
            yield first, request
            first, longest = request, length
    if first < len(lengths):
        yield first, len(lengths)


def copied(kv_cache: Tensor, block_table: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Copy the requests' rows to a new tensor ``[blocks, 128, width]``; return it with its block table."""
    block_size, width = kv_cache.shape[1:]
    step = max(1, BLOCK // block_size)
    columns = -(-longest // (block_size * step)) * step
    column = torch.arange(columns, device=block_table.device).clamp_(max=block_table.shape[1] - 1)
    # Entries after a request's end are arbitrary.
    blocks = block_table.index_select(1, column).clamp(0, kv_cache.shape[0] - 1)
    copy = kv_cache.index_select(0, blocks.flatten()).view(-1, BLOCK, width)
    table = torch.arange(copy.shape[0], dtype=torch.int32, device=copy.device)
    return copy, table.view(block_table.shape[0], -1)


def supports_mla_prefill(query: Tensor, key: Tensor, value: Tensor, query_start_loc: Tensor) -> bool | str:
    """Check for bfloat16, and heads of 192 and 128, 192 and 192, or 128 and 128 elements."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if why := problem(f"{KERNEL} in layout TND", name, tensor, (torch.bfloat16,), like=query):
            return why
    if (query.shape[2], value.shape[2]) not in PREFILL_SIZES:
        sizes = ", ".join(f"{keys} and {values}" for keys, values in PREFILL_SIZES)
        return f"keys of {query.shape[2]} and values of {value.shape[2]} elements, not {sizes}"
    if query.shape[1] > MOST_HEADS:
        return f"{query.shape[1]} heads; {KERNEL} takes at most {MOST_HEADS}"
    if query_start_loc.shape[0] > MOST_REQUESTS + 1:
        return f"{query_start_loc.shape[0] - 1} requests; {KERNEL} takes at most {MOST_REQUESTS}"
    return True


def mla_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    max_query_len: int,
    max_key_len: int,
    scale: float,
    out: Tensor | None = None,
    causal: bool = True,
    query_start_loc_host: Sequence[int] | None = None,
    key_start_loc_host: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.mla.mla_prefill`. Skips requests without keys."""
    import torch_npu

    if query_start_loc_host is None or key_start_loc_host is None:
        query_start_loc_host, key_start_loc_host = from_device(query_start_loc, key_start_loc)
    rows = [end - start for start, end in itertools.pairwise(query_start_loc_host)]
    keys = [end - start for start, end in itertools.pairwise(key_start_loc_host)]
    if causal and any(0 < length < queries for queries, length in zip(rows, keys, strict=True)):
        raise NotSupported(f"{KERNEL} takes no request with more queries than keys")
    lse = query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=torch.float32)
    if out is None:
        out = query.new_empty((*query.shape[:2], value.shape[-1]))
    for request, length in enumerate(keys):
        if not length:
            out[query_start_loc_host[request] : query_start_loc_host[request + 1]] = 0.0
    for first, last in _runs(rows, keys):
        start, key_start = query_start_loc_host[first], key_start_loc_host[first]
        part = slice(start, query_start_loc_host[last])
        seen = slice(key_start, key_start_loc_host[last])
        result, part_lse = torch_npu.npu_fused_infer_attention_score_v2(
            query[part].contiguous(),
            key[seen].contiguous(),
            value[seen].contiguous(),
            atten_mask=triangle(query.device) if causal else None,
            actual_seq_qlen=[end - start for end in query_start_loc_host[first + 1 : last + 1]],
            actual_seq_kvlen=[end - key_start for end in key_start_loc_host[first + 1 : last + 1]],
            num_query_heads=query.shape[1],
            num_key_value_heads=key.shape[1],
            softmax_scale=scale,
            input_layout="TND",
            sparse_mode=CAUSAL if causal else ALL_KEYS,
            return_softmax_lse=True,
        )
        out[part] = result
        lse[:, part] = part_lse.squeeze(-1).t()
    return out, lse


def _runs(rows: Sequence[int], keys: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return ranges of adjacent requests that all have queries and keys."""
    first = None
    for request, (queries, length) in enumerate(zip(rows, keys, strict=True)):
        if queries and length:
            first = request if first is None else first
        elif first is not None:
            yield first, request
            first = None
    if first is not None:
        yield first, len(rows)
