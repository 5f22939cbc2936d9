"""vLLM 0.26 asks an attention class for the cache's shape and the order of its axes, not for its layouts."""

from __future__ import annotations

from ...attention import kv_layout
from ...attention.dense import AttentionFLBackend


def get_kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
) -> tuple[int, ...]:
    """The shape of a layer's cache."""
    return (num_blocks, num_kv_heads, block_size, 2 * head_size)


def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
    """The order of its axes in memory."""
    order = kv_layout.host_order()[1]
    return (1, 0, *(axis + 1 for axis in order[1:])) if include_num_layers_dimension else order


def answer_by_shape() -> None:
    """Give our attention class both answers."""
    for answer in (get_kv_cache_shape, get_kv_cache_stride_order):
        setattr(AttentionFLBackend, answer.__name__, staticmethod(answer))
