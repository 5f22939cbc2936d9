"""Attention for SGLang over the operators ``kv_cache_write``, ``paged_attention``, ``mla_decode`` and ``mla_sparse``.

SGLang's pool has one row per token; its table ``req_to_token`` names the row of each token of each request. Rows are
grouped into pages, so a page is a block of the operators, and every ``page_size``-th entry of the table names one.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from torch import Tensor

from ..compat import native_kernels
from . import draft_trees, indexer
from .attention_layers import OPERATORS, window
from .graph_batch import GraphBatch
from .metadata import AttentionFLMetadata

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


MAY_SKIP = False
"""No row is negative, because SGLang writes padding to row 0, which belongs to no request."""


class AttentionFLBackend(AttentionBackend):
    """SGLang's attention backend ``fl``."""

    operator = "paged_attention"
    forward_metadata: AttentionFLMetadata
    graph_batch: GraphBatch | None = None

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        chunk, length = model_runner.attention_chunk_size, model_runner.model_config.context_len
        if chunk is not None and length > chunk:
            raise ValueError(
                f"sglang_fl does not support attention in chunks of {chunk} tokens yet: give --context-length {chunk}"
            )
        self.page_size: int = model_runner.page_size
        self.req_to_token_pool = model_runner.req_to_token_pool  # SGLang's models read both pools from the backend
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.longest = min(length, int(getattr(self.token_to_kv_pool, "size", length)))

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Describe the batch of an eager step."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if batch.encoder_lens is not None:
            raise NotImplementedError("sglang_fl does not support cross attention yet")
        requests = batch.seq_lens.shape[0]
        if mode.is_decode_or_idle():
            self._describe(batch, [1] * requests)
        elif mode.is_target_verify():  # the drafts to verify are not counted yet
            drafts, branches = batch.spec_info.draft_token_num, getattr(batch.spec_info, "topk", 1)
            if branches > 1:
                sees = batch.spec_info.custom_mask.view(requests, drafts, drafts)
                self._describe_tree(batch, sees, batch.out_cache_loc.view(requests, drafts))
            else:
                self._describe(batch, [drafts] * requests, drafts)
        else:
            self._describe(batch, list(batch.extend_seq_lens_cpu))

    def describe_draft(self, forward_batch: ForwardBatch, number: int, branches: int) -> None:
        """Describe the batch that drafts a token after ``number`` drafts, none of which SGLang has counted."""
        batch, requests = forward_batch, forward_batch.seq_lens.shape[0]
        if branches == 1:
            self._describe(batch, [1] * requests, number)
            return
        slots = batch.out_cache_loc.view(requests, -1)
        self._describe_tree(batch, draft_trees.visible_drafts(slots, number, branches), slots)

    def _describe_tree(self, batch: ForwardBatch, sees: Tensor, slots: Tensor) -> None:
        """Describe new tokens that see some of the drafts; see :mod:`.draft_trees`."""
        longest = int(batch.seq_lens_cpu.max()) + slots.shape[1] if slots.shape[0] else 0
        self.forward_metadata = draft_trees.describe(batch.seq_lens, self._pages(batch, longest), longest, sees, slots)

    def _describe(self, batch: ForwardBatch, queries: list[int], uncounted: int = 0) -> None:
        """Describe a batch.

        Args:
            queries: new tokens of each request.
            uncounted: tokens of each request in the cache that the batch's lengths do not include.
        """
        requests, longest_query = len(queries), max(queries, default=0)
        if len({*queries}) <= 1:
            starts = longest_query * torch.arange(requests + 1, dtype=torch.int32, device=batch.seq_lens.device)
        else:
            starts = torch.zeros(requests + 1, dtype=torch.int32, device=batch.seq_lens.device)
            torch.cumsum(batch.extend_seq_lens, dim=0, out=starts[1:])
        longest = int(batch.seq_lens_cpu.max()) + uncounted if requests else 0
        exact = batch.spec_info is None  # a draft's length is known to the device first
        self.forward_metadata = AttentionFLMetadata(
            query_start_loc=starts,
            seq_lens=(batch.seq_lens + uncounted).to(torch.int32),
            block_table=self._pages(batch, longest).to(torch.int32),
            max_query_len=longest_query,
            max_seq_len=longest,
            query_start_loc_host=[0, *accumulate(queries)] if exact else None,
            seq_lens_host=batch.seq_lens_cpu.tolist() if exact else None,
        )

    @property
    def verify_mask(self) -> Any:
        """Return the layout of masks: columns for drafts only, in a tensor for each step."""
        from sglang.srt.layers.attention.verify_mask import VerifyMask
        from sglang.srt.speculative.eagle_utils import TreeMaskMode

        return VerifyMask(torch.empty(0, dtype=torch.bool), TreeMaskMode.QLEN_ONLY, max_bs=0, is_read=False)

    def _pages(self, batch: ForwardBatch, longest: int) -> Tensor:
        """Return the page numbers of each request, ``[requests, pages of the longest]``."""
        table = self.req_to_token_pool.req_to_token[batch.req_pool_indices, : longest : self.page_size]
        return table if self.page_size == 1 else table // self.page_size

    # -- graphs -------------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate tensors for the batches of captured graphs."""
        table = self.req_to_token_pool.req_to_token
        self.graph_batch = GraphBatch.make(max_bs, -(-table.shape[1] // self.page_size), table.device)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Describe the batch of a captured or replayed step in the tensors that its graph reads.

        A graph keeps the choices for the longest sequence at capture, so capture announces the longest possible one. A
        graph would also keep host numbers, so it gets none.
        """
        batch = forward_batch
        assert self.graph_batch is not None
        lengths = batch.seq_lens_cpu
        longest = self.req_to_token_pool.req_to_token.shape[1] if lengths is None else int(lengths.max())
        starts, seq_lens, table = self.graph_batch.write(batch.seq_lens, self._pages(batch, longest))
        self.forward_metadata = AttentionFLMetadata(starts, seq_lens, table, 1, self.longest)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # SGLang also pads eager batches with this number

    # -- a layer ------------------------------------------------------------------------------------------------------

    def attends(self, layer: RadixAttention) -> bool:
        """Whether a model with this layer calls it."""
        return True

    def keys(self, layer: RadixAttention) -> Tensor:
        """Return a layer's keys in SGLang's pool, which is where latent attention has all that it stores."""
        keys: Tensor = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return keys

    def _caches(self, layer: RadixAttention) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer as views ``[pages, page_size, kv_heads, size]``."""
        keys = self.keys(layer)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if keys.dim() == 4:  # already pages, in another layout than SGLang's
            return keys, values
        return keys.unflatten(0, (-1, self.page_size)), values.unflatten(0, (-1, self.page_size))

    @staticmethod
    def scales(layer: RadixAttention, cache: Tensor) -> tuple[float | None, float | None]:
        """Return the scales of keys and values: the checkpoint's, or 1; ``None`` for an unquantized cache."""
        if cache.dtype is not torch.float8_e4m3fn:
            return None, None
        key, value = layer.k_scale_float, layer.v_scale_float
        return 1.0 if key is None else key, 1.0 if value is None else value

    def _run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Store the new keys and values, and attend.

        Args:
            q: ``[tokens, heads * head_size]``.
            k, v: ``[tokens, kv_heads, size]``; ``None`` if another layer has stored them.
            sinks: ``[heads]``.

        Returns:
            ``[tokens, heads * value_size]``.
        """
        if unknown:
            raise NotImplementedError(f"sglang_fl's attention does not know {', '.join(sorted(unknown))}")
        metadata = self.forward_metadata
        key_cache, value_cache = self._caches(layer)
        scales = self.scales(layer, key_cache)
        if save_kv_cache and k is not None and v is not None:
            slots = forward_batch.out_cache_loc
            OPERATORS.of(layer).write(k, v, key_cache, value_cache, slots, *scales, may_skip=MAY_SKIP)
        result = OPERATORS.of(layer).attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.max_query_len,
            metadata.max_seq_len,
            layer.scaling,
            None,
            layer.attn_type is not AttentionType.ENCODER_ONLY,
            window(layer),
            layer.logit_cap,
            None,
            sinks,
            *scales,
            query_start_loc_host=metadata.query_start_loc_host,
            seq_lens_host=metadata.seq_lens_host,
        )
        return result.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_extend = forward_decode = _run

    def support_triton(self) -> bool:
        return native_kernels.start_triton()


class MLAFLBackend(AttentionFLBackend):
    """Our backend for latent attention, in its absorbed form: one latent row per token serves all heads.

    A row is ``[rank + rope]``: the latent part, which is also the value, then the rotary part. An fp8 row has the scale
    of the layer's keys. In models with an indexer a query attends only to the rows in its index list.
    """

    operator = "mla_decode"
    topk: int | None = None
    """Entries of an index list, in models with an indexer."""
    lists: Tensor | None = None
    """The index lists of the last indexer, ``[tokens, topk]`` int32, also read by layers without an indexer."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        for layer in model_runner.model.modules():
            if isinstance(layer, RadixAttention):
                plain = layer.attn_type is AttentionType.DECODER and not layer.logit_cap
                if not plain or layer.sliding_window_size > -1:
                    raise ValueError("sglang_fl supports latent attention only causal, without a window or a cap yet")
        self.topk = indexer.topk_of(model_runner.model_config.hf_text_config)
        if self.topk is not None:
            self.operator = "mla_sparse"
            pool = self.token_to_kv_pool
            pool.index_keys = indexer.reserve(model_runner.model, pool.get_key_buffer, self.page_size, self)

    def attends(self, layer: RadixAttention) -> bool:
        """Whether a layer attends here, unlike the layer of DeepSeek's blocks for unabsorbed keys, which fit no row."""
        return (layer.tp_k_head_num, layer.qk_head_dim) == tuple(self.keys(layer).shape[1:])

    def _run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Store the new rows, and attend.

        Args:
            q: ``[tokens, heads, rank + rope]``, or flattened.
            k: ``[tokens, 1, rank + rope]``; ``None`` if the rows are already stored.
            v: the latent part of ``k``.

        Returns:
            ``[tokens, heads * rank]``.
        """
        if sinks is not None or unknown:
            unknown = {**unknown, **({} if sinks is None else {"sinks": sinks})}
            raise NotImplementedError(f"sglang_fl's latent attention does not know {', '.join(sorted(unknown))}")
        metadata, rank = self.forward_metadata, layer.v_head_dim
        rows = self.keys(layer).unflatten(0, (-1, self.page_size))
        scale, _ = self.scales(layer, rows)
        if save_kv_cache and k is not None:
            k = k.view(-1, 1, layer.qk_head_dim)
            OPERATORS.of(layer).write(
                k[..., :rank],
                k[..., rank:],
                rows[..., :rank],
                rows[..., rank:],
                forward_batch.out_cache_loc,
                scale,
                scale,
                may_skip=MAY_SKIP,
            )
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self.lists is not None:
            listed: Tensor = OPERATORS.of(layer).attend_listed(
                query,
                rows.squeeze(2),
                self.lists,
                metadata.block_table,
                metadata.query_start_loc,
                metadata.max_query_len,
                layer.scaling,
                rank,
                None,
                scale,
            )
            return listed.reshape(-1, layer.tp_q_head_num * rank)
        result: Tensor = OPERATORS.of(layer).attend_latent(
            query,
            rows.squeeze(2),
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.max_query_len,
            metadata.max_seq_len,
            layer.scaling,
            rank,
            None,
            True,
            scale,
            query_start_loc_host=metadata.query_start_loc_host,
            seq_lens_host=metadata.seq_lens_host,
        )
        return result.reshape(-1, layer.tp_q_head_num * rank)

    forward_extend = forward_decode = _run


def create(model_runner: ModelRunner) -> AttentionFLBackend:
    """Create the backend for SGLang's factory."""
    return (MLAFLBackend if model_runner.use_mla_backend else AttentionFLBackend)(model_runner)


def absorb_always(attention: Any, forward_batch: ForwardBatch) -> Any:
    """Return the absorbed form of latent attention, when DeepSeek's layers ask a backend for each batch."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    if getattr(attention, "learnable_sink_param", None) is not None:
        raise NotImplementedError("sglang_fl does not support attention sinks in latent attention yet")
    return AttnForwardMethod.MLA


def ours(backend: AttentionBackend) -> AttentionFLBackend | None:
    """Return our backend: this one, or the one to which SGLang's backend delegates some layers or batches."""
    if isinstance(backend, AttentionFLBackend):
        return backend
    inner = (vars(backend).get(name) for name in ("prefill_backend", "decode_backend", "full_attn_backend", "primary"))
    return next((found for found in inner if isinstance(found, AttentionFLBackend)), None)
