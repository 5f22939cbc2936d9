"""A step's batch for attention: the operators' part of vLLM's description, on the device and on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from ..schedulers import SCHEDULERS
from .divided import Part, part_of
from .token_blocks import token_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class AttentionFLMetadata:
    """A step's batch for all layers of one KV-cache group.

    Args:
        num_actual_tokens: tokens without padding.
        query_start_loc: ``[requests + 1]`` int32; first token of each request.
        seq_lens: ``[requests]`` int32; tokens of each request in the cache, including the new ones.
        block_table: ``[requests, blocks]`` int32.
        query_start_loc_host, seq_lens_host: the numbers in these tensors; ``None`` if vLLM's host copies are not exact.
        part: this rank's part of the context, if ranks divide the cache by tokens.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    causal: bool
    query_start_loc_host: list[int] | None = None
    seq_lens_host: list[int] | None = None
    part: Part | None = None


class AttentionFLMetadataBuilder(AttentionMetadataBuilder[AttentionFLMetadata]):
    """Builder of the operators' metadata from vLLM's description of a batch.

    A captured graph keeps the choices made from ``max_query_len`` and ``max_seq_len`` at capture. All batches with the
    same number of new tokens for every request share a graph, so a choice by phase is right for all replays.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.encoder_only = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        self.exact_host_lengths = has_exact_host_lengths(vllm_config)
        self.parallel = vllm_config.parallel_config

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttentionFLMetadata:
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise NotImplementedError("batches of causal and bidirectional requests are not supported")
        starts, lengths = host_lengths(common) if self.exact_host_lengths else (None, None)
        divided = self.parallel.decode_context_parallel_size > 1
        part = part_of(common, self.parallel, self.kv_cache_spec.block_size) if divided else None
        return AttentionFLMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=_token_blocks(common) if self.encoder_only else common.block_table_tensor,
            causal=common.causal,
            query_start_loc_host=starts,
            seq_lens_host=lengths,
            part=part,
        )


def has_exact_host_lengths(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's copies of a batch's lengths on the host are exact.

    With speculation they are bounds, because the device decides how many drafts count. With fast prefill of layers that
    share a cache they may be missing, because vLLM copies them from the device without waiting. Several steps for one
    scheduler call may end early, after vLLM has scheduled the next ones.
    """
    if vllm_config.speculative_config is not None or vllm_config.cache_config.kv_sharing_fast_prefill:
        return False
    return vllm_config.scheduler_config.scheduler_cls != SCHEDULERS[True]


def host_lengths(common: CommonAttentionMetadata) -> tuple[list[int] | None, list[int] | None]:
    """Return the starts and lengths of a batch's requests from vLLM's host copies, if it has both."""
    lengths = getattr(common, "seq_lens_cpu_upper_bound", None)
    return (None, None) if lengths is None else (common.query_start_loc_cpu.tolist(), lengths.tolist())


def _token_blocks(common: CommonAttentionMetadata) -> Tensor:
    return token_blocks(common.query_start_loc, common.max_query_len, common.num_actual_tokens)
