"""A step's batch for sparse latent attention and its indexer.

An *index list* has the positions of the ``topk`` tokens that a query attends to. A batch in which every request has at
most ``topk`` tokens takes dense latent attention, as in vLLM's own classes: its indexer writes keys and makes no lists.
In captured graphs, and with ``sparse_mla_force_mqa``, indexers always make lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from .attention_class import LatentQuestions
from .mla_metadata import MLAFLMetadata, MLAFLMetadataBuilder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

INDEX_OPERATORS = ("index_key_write", "index_topk")
"""The operators of an indexer."""


def longest_dense(vllm_config: VllmConfig) -> int:
    """Return the largest number of tokens of a request with dense attention: ``topk``, or 0 if lists are forced.

    Users can force lists. A predictor forces them too if its first draft of a step makes the lists of all drafts.
    """
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    shares = getattr(getattr(draft, "hf_config", None), "index_share_for_mtp_iteration", False)
    topk: int = vllm_config.model_config.hf_text_config.index_topk
    return 0 if shares or vllm_config.attention_config.sparse_mla_force_mqa else topk


@dataclass
class SparseMLAFLMetadata(MLAFLMetadata):
    """A step's batch for sparse latent attention; with ``lists`` the whole batch takes the absorbed form.

    Args:
        block_table: ``[requests, blocks]`` int32, of all requests.
        lists: whether each query attends to the tokens of its index list.
    """

    block_table: Tensor | None = None
    lists: bool = False


class SparseMLAFLMetadataBuilder(MLAFLMetadataBuilder):
    """The builder of dense latent attention for batches of short contexts; other batches are not split."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: object
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[arg-type]
        self.metadata_cls = SparseMLAFLMetadata
        self.longest_dense = longest_dense(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseMLAFLMetadata:
        if common_attn_metadata.max_seq_len > self.longest_dense:
            return self._listing(common_attn_metadata)
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        assert isinstance(metadata, SparseMLAFLMetadata)
        if metadata.prefill is not None:
            metadata.prefill.use_dense_mha = True
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> SparseMLAFLMetadata:
        return self._listing(common_attn_metadata)

    def _listing(self, batch: CommonAttentionMetadata) -> SparseMLAFLMetadata:
        """Describe a batch in which each query attends to its index list."""
        return SparseMLAFLMetadata(
            num_reqs=batch.num_reqs,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            num_actual_tokens=batch.num_actual_tokens,
            query_start_loc=batch.query_start_loc,
            slot_mapping=batch.slot_mapping,
            num_decodes=batch.num_reqs,
            num_decode_tokens=batch.num_actual_tokens,
            num_prefills=0,
            block_table=batch.block_table_tensor,
            lists=True,
        )


@dataclass
class IndexFLMetadata:
    """A step's batch for all indexers.

    Args:
        query_start_loc: ``[requests + 1]`` int32; first token of each request.
        seq_lens: ``[requests]`` int32; tokens of each request in the cache, including the new ones.
        block_table: ``[requests, blocks]`` int32.
        slot_mapping: ``[tokens]`` int64.
        lists: whether attention needs index lists.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    lists: bool


class IndexFLMetadataBuilder(AttentionMetadataBuilder[IndexFLMetadata]):
    """Builder of the indexers' metadata from vLLM's description of a batch."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: object
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.longest_dense = longest_dense(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> IndexFLMetadata:
        return self._built(common_attn_metadata, common_attn_metadata.max_seq_len > self.longest_dense)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> IndexFLMetadata:
        return self._built(common_attn_metadata, True)

    def _built(self, batch: CommonAttentionMetadata, lists: bool) -> IndexFLMetadata:
        """Describe a batch for an indexer; ``lists``: whether it makes index lists, or only writes keys."""
        return IndexFLMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            lists=lists,
        )


class IndexFLBackend(LatentQuestions, AttentionBackend):
    """The backend class of an indexer's cache, which names the builder of its metadata."""

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("an indexer's cache has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type[IndexFLMetadataBuilder]:
        return IndexFLMetadataBuilder
