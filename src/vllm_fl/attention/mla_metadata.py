"""A step's batch for latent attention: vLLM's description, and the first token of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLACommonPrefillMetadata,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from .divided import Part, rows_of
from .metadata import has_exact_host_lengths, host_lengths

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class MLAFLDecodeMetadata(MLACommonDecodeMetadata):
    """The decode part of a batch, with further arguments of ``mla_decode``.

    Args:
        query_start_loc: ``[requests + 1]`` int32; first token of each request.
        query_start_loc_host, seq_lens_host: the numbers in these tensors; ``None`` if vLLM's host copies are not exact.
        part: this rank's part of the cached tokens, if ranks divide the cache.
    """

    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    query_start_loc_host: list[int] | None = None
    seq_lens_host: list[int] | None = None
    part: Part | None = None


@dataclass(frozen=True)
class PrefillStarts:
    """First tokens of the requests in a batch's prefill part, as host integers, so that no layer waits for the device.

    Args:
        new: first new token of each request, and the end of the last one; valid for queries and keys.
        chunks: for each chunk of the cached context, the same of its queries and of its keys.
    """

    new: Sequence[int]
    chunks: Sequence[tuple[Sequence[int], Sequence[int]]]


def prefill_starts(prefill: MLACommonPrefillMetadata, query_start_loc: Sequence[int]) -> PrefillStarts:
    """Return the starts in a prefill part's tensors as integers.

    vLLM plans the part from its host copies, and makes its tensors from the plan, so these numbers are exact whenever
    the tensors are.

    Args:
        prefill: vLLM's description of the part.
        query_start_loc: host numbers of the part's requests; they need not begin at zero.
    """
    new = [start - query_start_loc[0] for start in query_start_loc]
    chunks = []
    for chunk in prefill.chunked_context.chunks if prefill.chunked_context else ():
        first, last, _ = chunk.request_slice.indices(len(new) - 1)
        queries = [start - new[first] for start in new[first : last + 1]]
        chunks.append((queries, [0, *accumulate(chunk.seq_lens.tolist())]))
    return PrefillStarts(new, chunks)


@dataclass
class MLAFLMetadata(MLACommonMetadata[MLAFLDecodeMetadata]):
    """A step's batch for all layers of one KV-cache group, with the first tokens of its prefill part."""

    prefill_starts: PrefillStarts | None = None

    def __post_init__(self) -> None:
        """Skip vLLM's check that its own kernel was compiled for this head size."""


class MLAFLMetadataBuilder(MLACommonMetadataBuilder[MLAFLMetadata]):
    """vLLM's builder, with the first token of each request in the decode part.

    As in other attention, batches with the same number of new tokens for every request share a captured graph.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, metadata_cls=MLAFLMetadata)
        self.exact_host_lengths = has_exact_host_lengths(vllm_config)
        self.seq_lens_host: list[int] | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAFLMetadata:
        self.seq_lens_host = host_lengths(common_attn_metadata)[1] if self.exact_host_lengths else None
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.prefill is not None:
            starts = common_attn_metadata.query_start_loc_cpu[metadata.num_decodes :]
            metadata.prefill_starts = prefill_starts(metadata.prefill, starts.tolist())
        return metadata

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None = None,
    ) -> MLAFLDecodeMetadata:
        """Describe the decoding requests of a batch, with host numbers if those are known."""
        lengths = self.seq_lens_host and self.seq_lens_host[: seq_lens_device.shape[0]]  # decoding requests come first
        part = None
        if dcp_tot_seq_lens_device is not None:
            starts = query_start_loc_device, query_start_loc_cpu.tolist()
            part = rows_of(seq_lens_device.cpu(), *starts, block_table_tensor, self.page_size)
            lengths = None
        return MLAFLDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start_loc_host=query_start_loc_cpu.tolist() if lengths else None,
            seq_lens_host=lengths or None,
            part=part,
        )
