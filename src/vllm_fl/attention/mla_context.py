"""The rows of a chunk of the cached context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata


def context_rows(
    kv_cache: Tensor,
    block_table: Tensor,
    chunk: MLACommonPrefillMetadata.ContextChunk,
    dtype: torch.dtype,
    scale: float | None = None,
) -> Tensor:
    """Return the cached rows of a context chunk, ``[rows, rank + rope]``, request after request.

    Args:
        kv_cache: ``[blocks, block_size, rank + rope]``.
        block_table: ``[requests, blocks]``, of the whole prefill part.
        dtype: dtype of the rows, if the cache has a scale.
        scale: scale of an fp8 cache; ``None`` for other dtypes.
    """
    request = chunk.token_to_seq.long()
    rows = torch.arange(request.shape[0], device=request.device)
    position = rows - chunk.cu_seq_lens[request] + chunk.starts[request]
    block_size = kv_cache.shape[1]
    blocks = block_table[chunk.request_slice][request, position // block_size]
    rows_found = kv_cache[blocks, position % block_size]
    return rows_found if scale is None else (rows_found.float() * scale).to(dtype)
