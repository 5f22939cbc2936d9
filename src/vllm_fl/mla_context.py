"""Cached context in chunks: one description for vLLM's versions, and the rows of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata


@dataclass(frozen=True)
class ContextChunk:
    """Some requests of a batch's prefill part, from a position of each: what is used of vLLM 0.32's class of this name.

    Args:
        request_slice: the requests, among those of the prefill part.
        token_slice: their new tokens, among the new tokens of that part.
        query_start_loc: ``[requests + 1]`` int32; first new token of each request, within ``token_slice``.
        max_query_len: largest number of new tokens of a request, or more.
        cu_seq_lens: ``[requests + 1]`` int32; first cached row of each request, within the chunk.
        starts: ``[requests]`` int32; position of that row in its sequence.
        max_seq_len: largest number of rows of a request.
        token_to_seq: ``[rows]`` int32; the request of each row.
    """

    request_slice: slice
    token_slice: slice
    query_start_loc: Tensor
    max_query_len: int
    cu_seq_lens: Tensor
    starts: Tensor
    max_seq_len: int
    token_to_seq: Tensor


def context_chunks(prefill: MLACommonPrefillMetadata) -> Sequence[ContextChunk]:
    """The chunks of a batch's cached context, without waiting for the device.

    In vLLM 0.26 a chunk has rows of all requests, of some of them perhaps none, and is a row of the plan's tensors; its
    description is kept on the plan, for the other layers of the step.
    """
    plan = prefill.chunked_context
    if plan is None:
        return ()
    if hasattr(plan, "chunks"):
        return plan.chunks
    chunks: list[ContextChunk] | None = getattr(plan, "fl_chunks", None)
    if chunks is None:
        every, new = slice(None), (prefill.query_start_loc, prefill.max_query_len)
        tensors = zip(plan.cu_seq_lens, plan.starts, plan.token_to_seq, strict=True)
        sizes = zip(plan.seq_tot, plan.max_seq_lens, strict=True)
        chunks = plan.fl_chunks = [
            ContextChunk(every, every, *new, row_starts, positions, longest, request[:rows])
            for (row_starts, positions, request), (rows, longest) in zip(tensors, sizes, strict=True)
        ]
    return chunks


def context_rows(kv_cache: Tensor, block_table: Tensor, chunk: ContextChunk) -> Tensor:
    """The cached rows of a context chunk, ``[rows, rank + rope]``, request after request.

    Args:
        kv_cache: ``[blocks, block_size, rank + rope]``.
        block_table: ``[requests, blocks]``, of the whole prefill part.
    """
    request = chunk.token_to_seq.long()
    rows = torch.arange(request.shape[0], device=request.device)
    position = rows - chunk.cu_seq_lens[request] + chunk.starts[request]
    block_size = kv_cache.shape[1]
    blocks = block_table[chunk.request_slice][request, position // block_size]
    return kv_cache[blocks, position % block_size]
