"""The indexer of sparse latent attention over ``index_key_write`` and ``index_topk``, replacing SGLang's.

An *index list* has the positions of the tokens that a query attends to. SGLang makes it with kernels for its own
devices, and chooses matching pages, cache and attention. So these models are presented to SGLang as other
latent-attention models, and each layer gets this indexer afterwards. Every batch has index lists, in a short context of
all tokens. Index keys have the model's dtype.

In graphs of prompts lists are made between pieces, as attention is computed there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fl_dispatch import bind_op

from ..compat import prompt_pieces
from .metadata import AttentionFLMetadata

PREDICTORS = ("DeepseekV3ForCausalLMNextN", "GlmMoeDsaForCausalLMNextN")
MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", *PREDICTORS)
"""Models with an indexer that are served."""
ON_FOREIGN = MODELS[:2]
"""Models with an indexer that are served on devices that SGLang does not know."""
OPERATORS = ("index_key_write", "index_topk")
SHARED = "shared"
"""A configuration's word for a layer that uses the lists of an earlier layer."""


def topk_of(config: Any) -> int | None:
    """Return the largest number of tokens that a query of the model attends to, or ``None`` for all of them."""
    return getattr(config, "index_topk", None)


def is_hosts_own(original: Callable[[Any], bool], config: Any) -> bool:
    """Return ``False``: no model gets SGLang's own sparse latent attention."""
    return False


class Reader(Protocol):
    """Attention that reads index lists."""

    forward_metadata: AttentionFLMetadata
    lists: Tensor | None


class IndexerFL(nn.Module):
    """Write an index key of each token, and the index list of each query: the tokens that it attends to."""

    reader: Reader
    cache: Tensor
    """Index keys ``[pages, page_size, dim]``, once there is a pool."""

    def __init__(self, attention: Any, config: Any, rope_scaling: Any, prefix: str) -> None:
        from sglang.srt.layers.layernorm import LayerNorm
        from sglang.srt.layers.linear import ReplicatedLinear
        from sglang.srt.layers.rotary_embedding import get_rope_wrapper

        super().__init__()
        self.heads, self.dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.rope, self.layer_id = attention.qk_rope_head_dim, attention.layer_id
        quantized = {"bias": False, "quant_config": attention.quant_config}
        self.wq_b = ReplicatedLinear(attention.q_lora_rank, self.heads * self.dim, prefix=f"{prefix}.wq_b", **quantized)
        self.wk = ReplicatedLinear(attention.hidden_size, self.dim, prefix=f"{prefix}.wk", **quantized)
        self.weights_proj = ReplicatedLinear(
            attention.hidden_size, self.heads, bias=False, prefix=f"{prefix}.weights_proj"
        )
        self.k_norm = LayerNorm(self.dim)
        self.rotary_emb = get_rope_wrapper(
            self.rope,
            rotary_dim=self.rope,
            max_position=attention.max_position_embeddings,
            base=attention.rope_theta,
            is_neox_style=not getattr(config, "indexer_rope_interleave", False),
            rope_scaling=rope_scaling,
            device=next(self.wk.parameters()).device.type,
        )
        self.scale = float((self.heads * self.dim) ** -0.5)
        self.write, self.list = (bind_op(operator, prefix) for operator in OPERATORS)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of index keys."""
        return next(self.weights_proj.parameters()).dtype

    def reserve(self, rows: Tensor, page_size: int, reader: Reader) -> None:
        """Allocate as many keys as there are ``rows`` of latents ``[slots, 1, width]``.

        The attention classes of a drafter's steps share them.
        """
        self.reader = reader
        shape = (len(rows) // page_size, page_size, self.dim)
        if getattr(self, "cache", rows).shape != shape:
            self.cache = torch.zeros(shape, dtype=self.dtype, device=rows.device)

    def _reader(self) -> Reader:
        """Return the attention in force; a drafter has one for each token."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        active = get_attn_backend()
        return active if isinstance(active, type(self.reader)) else self.reader

    def forward(self, *, x: Tensor, q_lora: Tensor, positions: Tensor, forward_batch: Any, layer_id: int) -> None:
        """Store index lists in the attention, which its layer runs next; SGLang's indexer returns them."""
        query = self.wq_b(q_lora)[0].view(-1, self.heads, self.dim)
        key = self.k_norm(self.wk(x)[0])
        weights = self.weights_proj(x)[0].float() * self.scale
        parts = query[..., : self.rope].contiguous(), key[:, None, : self.rope].contiguous()
        query_rope, key_rope = self.rotary_emb(positions, *parts)
        query = torch.cat((query_rope.view_as(parts[0]), query[..., self.rope :]), dim=-1)
        key = torch.cat((key_rope.view_as(parts[1])[:, 0], key[:, self.rope :]), dim=-1)
        prompt_pieces.run(self._list, forward_batch, query, key, weights)

    def _list(self, slots: Tensor, query: Tensor, key: Tensor, weights: Tensor) -> None:
        """Write the tokens' index keys, and store their lists in the attention."""
        self.write(key, self.cache, slots, None, may_skip=False)
        reader = self._reader()
        batch = reader.forward_metadata
        reader.lists = self.list(
            query,
            weights,
            self.cache,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            batch.max_query_len,
            batch.max_seq_len,
            self.topk,
        )


def add(
    result: None, attention: Any, config: Any, *args: Any, rope_scaling: Any = None, prefix: str = "", **kwargs: Any
) -> None:
    """Give a latent-attention layer its indexer, if the model has one and the layer uses no other layer's lists."""
    kinds = getattr(config, "indexer_types", None)
    if topk_of(config) is None or (kinds is not None and kinds[attention.layer_id] == SHARED):
        return
    attention.indexer = IndexerFL(attention, config, rope_scaling, f"{prefix}.indexer")
    attention.use_dsa = True  # its forward calls the indexer


def bytes_of_token(original: Callable[..., int], sizes: Any, configurator: Any, layers: int) -> int:
    """Return a token's bytes on a rank: SGLang's number, and the index keys outside its pool."""
    indexers = (module for module in configurator.model.modules() if isinstance(module, IndexerFL))
    return original(sizes, configurator, layers) + sum(one.dim * one.dtype.itemsize for one in indexers)


def reserve(model: nn.Module, rows_of: Callable[[int], Tensor], page_size: int, reader: Reader) -> list[Tensor]:
    """Allocate the index keys of a rank's layers; ``rows_of``: a layer's number → its rows of latents.

    Returns:
        The keys of each layer ``[slots, dim]``.

    Raises:
        ValueError: the rank's first layer uses the list of another rank's layer.
    """
    attending = [module for module in model.modules() if hasattr(module, "use_dsa") and hasattr(module, "indexer")]
    if attending and attending[0].indexer is None:
        raise ValueError(
            "sglang_fl does not support a rank with a first layer that takes the list of a layer before it yet; "
            "leave --pp-size at 1"
        )
    indexers = [module.indexer for module in attending if isinstance(module.indexer, IndexerFL)]
    for one in indexers:
        one.reserve(rows_of(one.layer_id), page_size, reader)
    return [one.cache.flatten(0, 1) for one in indexers]
