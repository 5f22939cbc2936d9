"""Warm-up of attention before graphs are captured: each kind of layer runs batches of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from fl_dispatch.hosting.start import warm_batches

from ..compat.runtime import largest_step
from .attention_backend import AttentionFLBackend, MLAFLBackend
from .attention_layers import NAMES, OPERATORS, layers
from .metadata import AttentionFLMetadata

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def warm_up(backend: AttentionFLBackend, runner: ModelRunner) -> int:
    """Run each kind of layer on batches of every kind; their requests have only new tokens.

    Returns:
        Number of calls of attention.
    """
    kinds: dict[Any, RadixAttention] = {}
    for _, layer in layers(runner.model):
        if backend.attends(layer):
            heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
            options = (layer.sliding_window_size, layer.logit_cap, layer.scaling, layer.attn_type)
            rules = warm_batches.rules(NAMES, OPERATORS.of(layer).scope)
            kinds.setdefault((heads, options, backend.scales(layer, backend.keys(layer)), *rules), layer)
    sizes = (largest_step(), runner.max_running_requests, backend.longest)
    batches = list(warm_batches.attention_batches(*sizes))
    for layer in kinds.values():
        for queries, longest in batches:
            _try(backend, layer, queries, longest, runner.dtype)
    return len(kinds) * len(batches)


def _try(
    backend: AttentionFLBackend, layer: RadixAttention, queries: Sequence[int], longest: int, dtype: torch.dtype
) -> None:
    """Call the layer's operators on a batch; keys are written to SGLang's padding row.

    Args:
        queries: new tokens of each request.
        longest: the announced number of keys.
    """
    tokens, options = sum(queries), {"device": backend.req_to_token_pool.req_to_token.device}
    starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32, **options)
    pages = torch.zeros(len(queries), -(-longest // backend.page_size), dtype=torch.int32, **options)
    if isinstance(backend, MLAFLBackend) and backend.topk is not None:  # an indexer would have made lists
        backend.lists = torch.zeros(tokens, backend.topk, dtype=torch.int32, **options)
    backend.forward_metadata = AttentionFLMetadata(starts, starts.diff(), pages, max(queries), longest)
    query = torch.zeros(tokens, layer.tp_q_head_num * layer.qk_head_dim, dtype=dtype, **options)
    key = torch.zeros(tokens, layer.tp_k_head_num, layer.qk_head_dim, dtype=dtype, **options)
    batch: Any = SimpleNamespace(out_cache_loc=torch.zeros(tokens, dtype=torch.int64, **options))
    backend.forward_extend(query, key, key[..., : layer.v_head_dim], layer, batch)
