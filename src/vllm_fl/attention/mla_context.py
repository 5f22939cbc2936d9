"""The rows of a chunk of the cached context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.layers.attention.mla_attention import reorg_kvcache

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata


def context_rows(
    kv_cache: Tensor,
    block_table: Tensor,
    chunk: MLACommonPrefillMetadata.ContextChunk,
    dtype: torch.dtype,
    rank: int,
    scale: float | None = None,
) -> Tensor:
    """Return the cached rows of a context chunk, ``[rows, rank + rope]``, request after request.

    Args:
        kv_cache: ``[blocks, block_size, rank + rope]``.
        block_table: ``[requests, blocks]``, of the whole prefill part.
        dtype: dtype of the rows, if the cache has a scale.
        rank: length of a row's latent part.
        scale: scale of an fp8 cache; ``None`` for other dtypes.
    """
    divided = chunk.local_starts is not None
    request, firsts = chunk.token_to_seq, chunk.cu_seq_lens
    if divided:
        request, firsts = chunk.padded_local_token_to_seq, chunk.padded_local_cu_seq_lens
    request = request.long()
    rows = torch.arange(request.shape[0], device=request.device)
    position = rows - firsts[request] + chunk.starts[request]
    block_size = kv_cache.shape[1]
    blocks = block_table[chunk.request_slice][request, position // block_size]
    rows_found = kv_cache[blocks, position % block_size]
    if divided:
        rows_found = _of_all_ranks(rows_found, chunk, rank)
    return rows_found if scale is None else (rows_found.float() * scale).to(dtype)


def _of_all_ranks(rows: Tensor, chunk: MLACommonPrefillMetadata.ContextChunk, rank: int) -> Tensor:
    """Collect the latent rows of a chunk from all ranks; ``rank``: the length of their latent part."""
    collected = get_dcp_group().all_gather(rows.contiguous(), dim=0)
    lengths = (chunk.padded_local_seq_lens, chunk.local_context_lens_allranks, chunk.local_starts)
    sizes = (chunk.num_context_tokens, chunk.max_seq_len, chunk.num_local_context_tokens)
    return torch.cat(reorg_kvcache(collected[:, :rank], collected[:, rank:], *lengths, *sizes), dim=-1)
