"""Scales of an fp8 KV cache, which SGLang keeps at each attention layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from torch import nn


def keep_own_name(original: Callable[..., str | None], name: str, params_dict: Mapping[str, Any]) -> str | None:
    """Return SGLang's name of a checkpoint's scale; keep the model's own name, which SGLang would drop."""
    return name if name in params_dict else original(name, params_dict)


class CacheScales(BaseKVCacheMethod):
    """Method that loads a checkpoint's ``k_scale`` and ``v_scale``; a layer without them has scales of 1.

    Args:
        quant_config: the model's configuration.
        announced: whether the checkpoint declares scales, so that none may be missing.
        prefix: the layer's prefix.
    """

    def __init__(self, quant_config: Any, announced: bool, prefix: str) -> None:
        super().__init__(quant_config)
        self._announced, self._prefix = announced, prefix

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        for name in ("k_scale", "v_scale") if self._announced else ():
            if not getattr(layer, name) > 0:  # SGLang starts with -1; some of its own models do not load them
                raise ValueError(f"the checkpoint announces '{name}', which was not loaded ({self._prefix})")
        super().process_weights_after_loading(layer)
