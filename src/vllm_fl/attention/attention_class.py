"""Answers to vLLM's questions about an attention class: the layout of the KV cache, and why it cannot serve a layer."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from . import kv_layout

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout


class CacheQuestions:
    """vLLM's questions to an attention class about the KV cache, answered by :mod:`~vllm_fl.attention.kv_layout`."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the physical layouts that the class can read."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout[kv_layout.host_order()],)


class LatentQuestions:
    """vLLM's questions to the class of a cache of latents or index keys, with one row per token of any size."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the name up in its own enum; this one is free

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # all

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBNHC,)


def attention_refusals(backend: Any, config: AttentionSelectorConfig, capability: DeviceCapability | None) -> list[str]:
    """Return in the attention class's words why it cannot serve a layer; the fields to check differ by version."""
    known = inspect.signature(backend.validate_configuration).parameters
    fields = {name: value for name, value in config._asdict().items() if name in known}
    reasons: list[str] = backend.validate_configuration(**fields, device_capability=capability)
    return reasons
