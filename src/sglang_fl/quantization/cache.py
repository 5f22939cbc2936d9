"""Scales of an fp8 KV cache, which SGLang keeps at each attention layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_server_args
from torch import Tensor, nn

from fl_dispatch.hosting.quantized import remedies
from fl_dispatch.hosting.quantized.layer_parts import below_roots

from ..checkpoint import is_of_target
from . import FP8_CACHE, refused

SCALE = re.compile(r"(.+?)(?:\.attn|\.[kv]_proj)?\.(k|v|kv)_scale|(.+)\.(k|v)_proj\.output_scale")
"""A checkpoint's name of a scale: the module above attention, and which it scales. ``kv`` is of keys, as in SGLang."""
REMEDY = "--kv-cache-dtype bfloat16 serves the checkpoint without them"


def keep_own_name(original: Callable[..., str | None], name: str, params_dict: Mapping[str, Any]) -> str | None:
    """Return SGLang's name of a checkpoint's scale; keep the model's own name, which SGLang would drop."""
    return name if name in params_dict else original(name, params_dict)


def load_scales(
    original: Callable[..., None], model: nn.Module, weights: Iterable[tuple[str, Tensor]], target_device: torch.device
) -> None:
    """Load the scales of attention that SGLang's model made without the checkpoint's configuration, then the rest."""
    if is_of_target():
        with target_device:
            given = add_scales(model)
        weights = without_scales(weights, given)
    original(model, weights, target_device)


def add_scales(model: nn.Module) -> dict[str, nn.Module]:
    """Give room for scales to attention that was made without the checkpoint's configuration, as in Qwen3.

    Returns:
        A checkpoint's name of the module above each such layer, below the model's roots → the layer.
    """
    attention: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for name, layer in model.named_modules():
        if isinstance(layer, RadixAttention):
            attention[below_roots(name.rpartition(".")[0])].append((name, layer))
    configs = (getattr(module, "quant_config", None) for module in model.modules())
    config = next((found for found in configs if found is not None), None)
    given = {}
    for above, layers in attention.items():
        (name, layer), *others = layers
        if others or layer.quant_method is not None:  # latent attention has two layers, and a configuration
            continue
        if config is not None:
            layer.quant_method = config.get_quant_method(layer, prefix=name)
        elif get_server_args().kv_cache_dtype == FP8_CACHE:
            layer.quant_method = CacheScales(None, False, name)
        if layer.quant_method is not None:
            layer.quant_method.create_weights(layer)
            for scale in ("k_scale", "v_scale"):  # no parameters, because Step 3.5 refuses those that it does not load
                layer.register_buffer(scale, layer._parameters.pop(scale).data)
            given[above] = given[f"{above}.self_attn"] = layer  # Falcon-H1 has no such module, but its files do
    return given


def without_scales(
    weights: Iterable[tuple[str, Tensor]], given: Mapping[str, nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    """Load the scales of given layers, whatever the model would do with them, and yield all other weights."""
    for name, tensor in weights:
        found = SCALE.fullmatch(name)
        above, part = (found[1] or found[3], found[2] or found[4]) if found else ("", "")
        if (layer := given.get(below_roots(above))) is None:
            yield name, tensor
        elif tensor.numel() > 1:
            raise refused(f"{remedies.SCALE_A_HEAD} ({name})", remedies.HEADS)
        else:
            default_weight_loader(getattr(layer, f"{part[0]}_scale"), tensor)


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
                raise ValueError(f"the checkpoint announces '{name}', which was not loaded ({self._prefix}); {REMEDY}")
        super().process_weights_after_loading(layer)
