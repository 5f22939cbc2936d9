"""Sparse latent attention for vLLM over ``mla_sparse``, and over dense latent attention for short contexts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_dispatch import bind_op
from fl_dispatch.hosting.start import warm_batches

from .mla import MLAFLBackend, MLAFLImpl
from .sparse_metadata import INDEX_OPERATORS, SparseMLAFLMetadata, SparseMLAFLMetadataBuilder

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer


class SparseMLAFLImpl(MLAFLImpl):
    """One layer's sparse latent attention; the last indexer has written index lists to the model's buffer."""

    is_sparse = True
    masked_mha_available = False

    def __init__(
        self, *args: Any, indexer: object | None = None, topk_indices_buffer: Tensor | None = None, **kwargs: Any
    ) -> None:
        kwargs.pop("index_group_builder", None)  # for vLLM's own kernels, which read slots instead of positions
        super().__init__(*args, **kwargs)
        self.fl_indexer: Any = indexer
        self.fl_given = topk_indices_buffer

    @property
    def fl_lists(self) -> Tensor | None:
        """Return the index lists ``[tokens, topk]`` int32; a predictor's indexer gets the model's after loading."""
        return self.fl_given if self.fl_indexer is None else self.fl_indexer.topk_indices_buffer

    def record_logical_topk_ready(self) -> None:
        """Skip vLLM's event, because no other stream waits for the lists."""

    def fl_bind(self, scope: str | None) -> None:
        """Bind the operators for the layer with this prefix."""
        super().fl_bind(scope)
        self.fl_listed = bind_op("mla_sparse", scope)

    def fl_kind(self) -> tuple[Any, ...]:
        """Return the layer's kind: layers of one kind call the operators with arguments of the same kind."""
        rules = warm_batches.rules((*INDEX_OPERATORS, "mla_sparse"), self.fl_scope)
        return (*super().fl_kind(), self.fl_indexer is None, *rules)

    def fl_try(self, kv_cache: Tensor, queries: Sequence[int], longest: int) -> None:
        """Call the operators on a batch of requests with ``queries`` new tokens; the cache keeps its contents."""
        super().fl_try(kv_cache, queries, longest)
        if self.fl_indexer is not None:
            self.fl_indexer.fl_try(queries, longest)
        lists = self.fl_lists
        if lists is None or lists.shape[0] < sum(queries):
            return
        device, tokens = kv_cache.device, sum(queries)
        dtype, scale = (self.fl_dtype, 1.0) if self.fl_fp8 else (kv_cache.dtype, None)
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device)
        table = torch.zeros(len(queries), -(-longest // kv_cache.shape[1]), dtype=torch.int32, device=device)
        query = torch.zeros(tokens, self.num_heads, self.kv_lora_rank, dtype=dtype, device=device)
        rope = query.new_zeros(tokens, self.num_heads, self.qk_head_dim)[..., self.qk_nope_head_dim :]
        nothing = torch.full_like(lists[:tokens], -1)
        self._attend((query, rope), kv_cache, nothing, table, starts, max(queries), scale)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMLAFLMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in the absorbed form; ``q`` is ``[tokens, heads, rank + rope]``, whole or in its two parts."""
        if not attn_metadata.lists:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        assert attn_metadata.block_table is not None
        assert self.fl_lists is not None
        out = self._attend(
            q,
            kv_c_and_k_pe_cache,
            self.fl_lists[: (q[0] if isinstance(q, tuple) else q).shape[0]],
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.max_query_len,
            layer._k_scale_float if self.fl_fp8 else None,
        )
        return out, None

    def _attend(
        self,
        query: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        lists: Tensor,
        block_table: Tensor,
        starts: Tensor,
        most: int,
        scale: float | None,
    ) -> Tensor:
        """Attend over the listed tokens; return latents ``[tokens, heads, kv_lora_rank]``."""
        absorbed, rope = query if isinstance(query, tuple) else (query, None)
        cache = self._stored(kv_cache)
        rest = (most, self.scale, self.kv_lora_rank, None, scale, rope)
        attended: Tensor = self.fl_listed(absorbed, cache, lists, block_table, starts, *rest)
        return attended


class SparseMLAFLBackend(MLAFLBackend):
    """The attention class of sparse layers if :class:`~vllm_fl.attention.mla.MLAFLBackend` is chosen."""

    @staticmethod
    def get_impl_cls() -> type[SparseMLAFLImpl]:
        return SparseMLAFLImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMLAFLMetadataBuilder]:
        return SparseMLAFLMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True
