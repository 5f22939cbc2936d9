"""Attention for vLLM on Ascend NPUs: the class of ``attention``, with blocks as the chip's kernels take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.attention.backend import MultipleOf

from fl_dispatch.backends.vendor.ascend.impl.attention import BLOCK_MULTIPLE

from .attention import AttentionFLBackend

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


class AscendAttentionBackend(AttentionFLBackend):
    """The class that ``attention_backend`` selects where ``vendor.ascend`` is preferred; its operators are dispatched.

    Another implementation of an operator serves what the chip's kernels decline, over the same cache.
    """

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_MULTIPLE)]
