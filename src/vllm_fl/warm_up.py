"""Attention calls of every kind before a GPU serves, so that no kernel is compiled during a request.

Kernels are compiled for kinds of batches: decode or prefill, short or long, one request or many. vLLM's own warm-up has
a few of them. The calls here have hardly any keys, whatever lengths they announce, so they take no time of the device;
and they come before graphs are captured, where an implementation's first failure could not be told from a failed graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .attention import AttentionFLImpl

if TYPE_CHECKING:
    from vllm.config import VllmConfig

QUERIES = (1, 2, 3, 5, 9, 17, 33, 65, 200)
"""New tokens of a request: each is in another power of two, at which kernels change."""
REQUESTS = (1, 2, 5, 40)
MIXED = ((1, 300), (1, 1, 1, 1, 70))


@torch.inference_mode()
def attention(model: nn.Module, vllm_config: VllmConfig) -> int:
    """Call attention and the cache write for each kind of layer and batch; returns the number of calls."""
    kinds: dict[Any, tuple[AttentionFLImpl, Tensor]] = {}
    for module in model.modules():
        impl, cache = getattr(module, "impl", None), getattr(module, "kv_cache", None)
        if isinstance(impl, AttentionFLImpl) and isinstance(cache, Tensor) and cache.dim() == 4 and cache.numel():
            kinds.setdefault((impl.fl_kind(), tuple(cache.shape[1:]), cache.dtype), (impl, cache))
    calls = 0
    for impl, cache in kinds.values():
        for queries, longest in _batches(vllm_config):
            impl.fl_try(cache, queries, longest)
            calls += 1
    torch.accelerator.synchronize()
    return calls


def _batches(vllm_config: VllmConfig) -> Iterator[tuple[tuple[int, ...], int]]:
    """New tokens of each request of a batch, and the number of keys that it announces."""
    scheduler, length = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    alike = ((queries,) * requests for queries, requests in product(QUERIES, REQUESTS))
    for queries in (*alike, *MIXED):
        if sum(queries) <= scheduler.max_num_batched_tokens and len(queries) <= scheduler.max_num_seqs:
            lengths = {max(queries), min(length, 1024), min(length, 4096), length}
            yield from ((queries, longest) for longest in sorted(lengths) if max(queries) <= longest)
