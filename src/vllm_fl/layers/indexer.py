"""vLLM's indexer of sparse latent attention over ``index_key_write`` and ``index_topk``.

Index keys of half-type models are in fp8 as published, with the scales of a block after its keys, and ``index_topk``
rounds their queries by the same rule. In models in float32, on chips without fp8, or with ``indexer_kv_dtype="bf16"``,
keys and queries have the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache, Indexer
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name, direct_register_custom_op

from fl_dispatch import bind_op
from fl_dispatch.devices import detect_device
from fl_dispatch.ops.quantization import FP8
from fl_dispatch.ops.sparse_mla import INDEX_GROUP

from ..attention.cache_slots import real
from ..attention.sparse import SparseMLAFLImpl
from ..attention.sparse_metadata import INDEX_OPERATORS, IndexFLBackend, IndexFLMetadata
from ..compat.indexer import replace_indexer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

SCALE_BYTES = torch.float32.itemsize
# A reload must keep the library, because compiled graphs hold its operators.
_library: torch.library.Library | None = globals().get("_library")


def stores_fp8(vllm_config: VllmConfig) -> bool:
    """Whether index keys are quantized."""
    half = vllm_config.model_config.dtype != torch.float32
    usual: Any = "fp8" if half and detect_device().float8 else "bf16"
    return vllm_config.attention_config.resolve_indexer_kv_dtype(usual) == "fp8"


def _joined(rotated: Tensor, rest: Tensor, whole: Tensor) -> Tensor:
    """Return rows of both parts: ``whole`` if its first elements were rotated in place, else new ones."""
    in_place = not torch.compiler.is_compiling() and rotated.data_ptr() == whole.data_ptr()
    return whole if in_place else torch.cat((rotated, rest), dim=-1)


class IndexCacheFL(DeepseekV32IndexerCache):
    """The paged cache of one indexer's keys."""

    fl_index: Callable[..., None]
    """The indexer's work on a batch."""
    fl_scales: Tensor | None = None

    def fl_set_slot_format(self, dim: int, dtype: torch.dtype, fp8: bool) -> None:
        """Set the content of a slot: a key in fp8 and its scales, or a key in ``dtype``."""
        self.fl_dim, self.fl_fp8 = dim, fp8
        self.head_dim = dim + SCALE_BYTES * -(-dim // INDEX_GROUP) if fp8 else dim
        self.dtype = torch.uint8 if fp8 else dtype

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return replace(super().get_kv_cache_spec(vllm_config), head_size=self.head_dim, dtype=self.dtype)

    def get_attn_backend(self) -> type[IndexFLBackend]:
        return IndexFLBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Keep the cache and, for fp8, its views: all keys of a block come before all of its scales."""
        super().bind_kv_cache(kv_cache)
        self.fl_keys, self.fl_scales = self.kv_cache, None
        if self.fl_fp8 and self.kv_cache.numel():
            blocks, size, width = self.kv_cache.shape
            groups, block = (width - self.fl_dim) // SCALE_BYTES, self.kv_cache.stride(0)
            keys = self.kv_cache.as_strided((blocks, size * self.fl_dim), (block, 1))
            start = self.kv_cache.storage_offset() + size * self.fl_dim
            scales = self.kv_cache.as_strided((blocks, size * groups * SCALE_BYTES), (block, 1), start)
            self.fl_keys = keys.view(FP8).unflatten(1, (size, self.fl_dim))
            self.fl_scales = scales.view(torch.float32).unflatten(1, (size, groups))


class IndexerFL(Indexer):
    """vLLM's indexer with our operators; it fills its model's buffer with the positions that queries attend to."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        if (check := getattr(self.quant_config, "fl_check_index_keys", None)) is not None:
            check(self.wk_weights_proj, f"{self.prefix}.wk")
        del self.indexer_op
        self.k_cache.fl_set_slot_format(self.head_dim, vllm_config.model_config.dtype, stores_fp8(vllm_config))
        self.fl_dtype = vllm_config.model_config.dtype
        self.k_cache.fl_index = self.fl_index
        self.fl_write, self.fl_list = (bind_op(operator, self.prefix) for operator in INDEX_OPERATORS)

    def forward(self, hidden_states: Tensor, qr: Tensor, positions: Tensor, rotary_emb: nn.Module) -> None:
        """Write the index keys of new tokens, and the index list of each: the tokens that it attends to."""
        query = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        projected = self.wk_weights_proj(hidden_states)[0]
        key, weights = projected.split([self.head_dim, self.n_head], dim=-1)
        key = self.k_norm(key)
        rest = self.head_dim - self.rope_dim
        query_rope, query_rest = query.split([self.rope_dim, rest], dim=-1)
        key_rope, key_rest = key.split([self.rope_dim, rest], dim=-1)
        query_rope, key_rope = rotary_emb(positions, query_rope, key_rope.unsqueeze(1))
        query = _joined(query_rope.reshape(-1, self.n_head, self.rope_dim), query_rest, query)
        key = _joined(key_rope.reshape(-1, self.rope_dim), key_rest, key)
        weights = weights.float() * (self.softmax_scale * self.n_head_scale)
        name = _encode_layer_name(self.k_cache.prefix)
        torch.ops.vllm_fl.sparse_index(query, weights, key, self.topk_indices_buffer, name)

    def fl_try(self, queries: Sequence[int], longest: int) -> None:
        """Call the operators on a batch of requests with ``queries`` new tokens; cache and lists keep their contents.

        Args:
            queries: new tokens of each request; requests have no earlier tokens.
            longest: the announced number of keys.
        """
        keys, tokens, topk = self.k_cache.fl_keys, sum(queries), self.topk_tokens
        device = keys.device
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device)
        table = torch.zeros(len(queries), -(-longest // keys.shape[1]), dtype=torch.int32, device=device)
        query = torch.zeros(tokens, self.n_head, self.head_dim, dtype=self.fl_dtype, device=device)
        slots = torch.full((tokens,), -1, device=device)
        batch = IndexFLMetadata(tokens, max(queries), longest, starts, starts.diff(), table, slots, lists=True)
        lists = torch.empty(tokens, topk, dtype=torch.int32, device=device)
        self.fl_index(query, query.new_ones(tokens, self.n_head, dtype=torch.float32), query[:, 0], lists, batch)

    def fl_index(self, query: Tensor, weights: Tensor, key: Tensor, lists: Tensor, batch: IndexFLMetadata) -> None:
        """Write keys ``[tokens, dim]``, and fill rows of ``lists`` if the batch's attention needs them."""
        cache, (slots, may_skip) = self.k_cache, real(batch.slot_mapping)
        self.fl_write(key[: slots.shape[0]], cache.fl_keys, slots, cache.fl_scales, may_skip=may_skip)
        if batch.lists:
            tokens, topk = batch.num_actual_tokens, self.topk_tokens
            self.fl_list(
                query[:tokens],
                weights[:tokens],
                cache.fl_keys,
                batch.block_table,
                batch.query_start_loc,
                batch.seq_lens,
                batch.max_query_len,
                batch.max_seq_len,
                topk,
                lists[:tokens, :topk],
                cache.fl_scales,
            )


def _sparse_index(query: Tensor, weights: Tensor, key: Tensor, lists: Tensor, layer: Any) -> None:
    """Run the whole indexer after its projections, for compiled code; also called for vLLM's runs without a batch."""
    context, prefix = get_forward_context(), _resolve_layer_name(layer)
    if isinstance(context.attn_metadata, dict):
        context.no_compile_layers[prefix].fl_index(query, weights, key, lists, context.attn_metadata[prefix])


def _fake(query: Tensor, weights: Tensor, key: Tensor, lists: Tensor, layer: Any) -> None:
    return None


def outside_graphs() -> Callable[..., None]:
    """Return the indexer as a break in vLLM's breakable graphs, the default for these models."""
    broken: Callable[..., None] = eager_break_during_capture(_sparse_index)
    return broken


def install() -> None:
    """Make models with sparse latent attention use our indexer."""
    global _library
    if _library is None:
        _library = torch.library.Library("vllm_fl", "FRAGMENT")
        operands = dict.fromkeys(("query", "weights", "key", "lists"), Tensor)
        # Real types, because the host resolves type names in the module of its wrapper.
        _sparse_index.__annotations__ = _fake.__annotations__ = {**operands, "layer": LayerNameType, "return": None}
        direct_register_custom_op(
            "sparse_index", outside_graphs(), mutates_args=["lists"], fake_impl=_fake, target_lib=_library
        )
    replace_indexer(IndexerFL, IndexCacheFL)


def check(model: nn.Module) -> None:
    """Check that the first layer of a rank's part of the model makes a list, because some models' layers share lists.

    Raises:
        ValueError: it uses the list of another rank's layer, or none.
    """
    impls = ((prefix, getattr(layer, "impl", None)) for prefix, layer in model.named_modules())
    first, impl = next((found for found in impls if isinstance(found[1], SparseMLAFLImpl)), ("", None))
    if impl is not None and impl.fl_indexer is None:
        raise ValueError(
            f"vllm_fl does not support '{first}' as the first layer of a rank yet: it takes the list of tokens of a "
            "layer before it; leave --pipeline-parallel-size at 1"
        )
