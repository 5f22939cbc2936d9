"""The weight of a quantized ``kv_b_proj``, which vLLM finds by a product with ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.attention import mla_attention

from fl_dispatch.hosting.layers.layer_kernels import KERNEL
from fl_dispatch.hosting.quantized.layers import QuantizedLayer

NAME = "get_and_maybe_dequant_weights"


def ask_exactly() -> None:
    """Have vLLM multiply exact ones, which a layer that quantizes its rows would round. Idempotent."""
    hosts = getattr(mla_attention, NAME)
    if not hasattr(hosts, "__wrapped__"):
        setattr(mla_attention, NAME, _exact(hosts))


def _exact(hosts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return vLLM's function with a layer's rows as they are while it multiplies ones."""

    @wraps(hosts)
    def weight(layer: Any, *args: Any, **named: Any) -> Tensor:
        kernel = KERNEL.find(layer)
        with kernel.fl_exact() if isinstance(kernel, QuantizedLayer) else nullcontext():
            return hosts(layer, *args, **named)

    return weight
