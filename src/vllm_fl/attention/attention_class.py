"""Questions that vLLM asks an attention class: how the KV cache lies in memory, and why it cannot serve a layer."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from . import kv_layout

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.kv_cache_layout import KVCacheLayout


class CacheQuestions:
    """vLLM's questions to an attention class about the KV cache, answered by :mod:`~vllm_fl.attention.kv_layout`."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The physical layouts that it can read."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout[kv_layout.host_order()],)


def attention_refusals(backend: Any, config: AttentionSelectorConfig, capability: DeviceCapability | None) -> list[str]:
    """Why an attention class cannot serve a layer, in its own words; the fields to be judged differ by version."""
    known = inspect.signature(backend.validate_configuration).parameters
    fields = {name: value for name, value in config._asdict().items() if name in known}
    reasons: list[str] = backend.validate_configuration(**fields, device_capability=capability)
    return reasons
