"""Latent attention of vLLM 0.26: its plan of the context, which is pinned and numbers its chunks, and its prefill."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor

from fl_dispatch.hosting.memory.pinning import unpinned

from ...attention.mla_metadata import MLAFLMetadata, MLAFLMetadataBuilder
from ...attention.mla_prefill import MLAFLPrefillBackend

MLA = "vllm.model_executor.layers.attention.mla_attention"


def plan_context_unpinned() -> None:
    """Let vLLM plan the context where no memory can be pinned. Idempotent."""
    module: Any = importlib.import_module(MLA)
    plan = module.build_mla_chunked_context_metadata
    if hasattr(plan, "__wrapped__"):
        return

    module.build_mla_chunked_context_metadata = unpinned(plan)


# -- chunks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContextChunk:
    """Some requests of a batch's prefill part, from a position of each: what is used of later versions' class.

    A chunk here has rows of all requests, of some of them perhaps none.
    """

    request_slice: slice
    token_slice: slice
    query_start_loc: Tensor
    max_query_len: int
    cu_seq_lens: Tensor
    starts: Tensor
    max_seq_len: int
    seq_lens: Tensor
    token_to_seq: Tensor


def chunks(prefill: Any) -> list[ContextChunk]:
    """The chunks of a batch's cached context: rows of the plan's tensors. Does not wait for the device."""
    plan, every = prefill.chunked_context, slice(None)
    new = (prefill.query_start_loc, prefill.max_query_len)
    tensors = zip(plan.cu_seq_lens, plan.starts, plan.token_to_seq, strict=True)
    sizes = zip(plan.seq_tot, plan.max_seq_lens, plan.seq_lens, strict=True)  # all of the host
    return [
        ContextChunk(every, every, *new, row_starts, positions, longest, lengths, request[:rows])
        for (row_starts, positions, request), (rows, longest, lengths) in zip(tensors, sizes, strict=True)
    ]


def with_chunks(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a prefill part, which then describes its chunks on the plan."""

    @wraps(original)
    def __init__(prefill: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  it becomes one
        original(prefill, *args, **kwargs)
        if prefill.chunked_context is not None:
            prefill.chunked_context.chunks = chunks(prefill)

    return __init__


def with_longest_query(original: Callable[..., Any]) -> Callable[..., Any]:
    """Our description of a batch's decode part; longer requests than the threshold are in the other part."""

    @wraps(original)
    def _build_decode(builder: Any, *args: Any, **kwargs: Any) -> Any:
        return original(builder, *args, max_query_len=builder.reorder_batch_threshold, **kwargs)

    return _build_decode


def describe_chunks() -> None:
    """Describe batches as later versions do. Idempotent."""
    module: Any = importlib.import_module(MLA)
    prefill, builder = module.MLACommonPrefillMetadata, MLAFLMetadataBuilder
    if not hasattr(prefill.__init__, "__wrapped__"):
        prefill.__init__ = with_chunks(prefill.__init__)
        builder._build_decode = with_longest_query(builder._build_decode)  # type: ignore[method-assign]
        MLAFLMetadata.causal = True  # there are no batches that are not


# -- prefill ----------------------------------------------------------------------------------------------------------


class NumberedChunks(MLAFLPrefillBackend):
    """Our prefill, for which a chunk is named by its number."""

    def run_prefill_context_chunk(  # type: ignore[override]
        self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        return super().run_prefill_context_chunk(self._prefill_metadata.chunked_context.chunks[chunk_idx], q, k, v)


def offer_prefill() -> None:
    """Put our prefill backend in the place of vLLM's FlashAttention, which is taken on every platform."""
    from vllm.v1.attention.backends.mla.prefill.registry import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )

    register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, f"{__name__}.{NumberedChunks.__name__}")
