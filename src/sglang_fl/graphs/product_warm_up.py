"""Warm-up of products with weights before graphs are captured, for every batch size up to a prompt's step.

A decoding batch has few tokens, and the products of prompts run other kernels. From the capture on choices are fixed,
and a failure ends the engine, so each kernel runs before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fl_dispatch.hosting.layers.layer_kernels import LayerKernel, kernels
from fl_dispatch.hosting.quantized.experts import QuantizedExperts
from fl_dispatch.hosting.start import warm_batches

from ..bridge.linear import Product
from ..bridge.mixture import MIXTURE


def warm_up(model: nn.Module, most_tokens: int, dtype: torch.dtype) -> int:
    """Multiply zeros by the weights of each kind; return the number of calls.

    Args:
        most_tokens: largest number of tokens of a step.
        dtype: the model's dtype.
    """
    layers: dict[Any, tuple[nn.Module, LayerKernel]] = {}
    for _, layer, kernel in kernels(model):
        layers.setdefault(_kind(layer, kernel), (layer, kernel))
    counts = warm_batches.token_counts(most_tokens)
    return sum(_try(layer, kernel, tokens, dtype) for layer, kernel in layers.values() for tokens in counts)


@torch.no_grad()
def keep_forms(model: nn.Module) -> None:
    """Multiply once by each plain weight, so that implementations allocate their weight forms now.

    SGLang measures the memory for its cache after the model is loaded, before it calls any layer.
    """
    for _, layer, kernel in kernels(model):
        if isinstance(kernel, Product) and kernel.fl_weights:
            weight: Any = layer.weight
            kernel.apply_weights(layer, weight.new_zeros(1, weight.shape[1]))


def _kind(layer: nn.Module, kernel: LayerKernel) -> tuple[Any, ...]:
    """Return a layer's kind: layers of one kind call the operators with arguments of the same kind."""
    tensors = [(name, value.shape, value.dtype) for name, value in layer.named_parameters(recurse=False)]
    return type(kernel), str(tensors), *warm_batches.rules((kernel.fl_operator, "quantize"), kernel.fl_scope)


def _try(layer: Any, kernel: Any, tokens: int, dtype: torch.dtype) -> int:
    """Multiply zeros; return the number of calls."""
    if isinstance(kernel, Product):  # a router may have a wider dtype; only the first rank passes a bias
        x = layer.weight.new_zeros(tokens, layer.weight.shape[1])
        biases = (None,) if layer.bias is None else (layer.bias, None)
        for bias in biases:
            kernel.apply_weights(layer, x, bias)
        return len(biases)
    x = torch.zeros(tokens, layer.quant_method.inner, dtype=dtype, device=next(layer.parameters()).device)
    if not isinstance(kernel, QuantizedExperts):
        kernel.apply_weights(layer, x, getattr(layer, "bias", None))
        return 1
    mixture = MIXTURE.of(layer)
    chosen, experts = mixture.config.top_k or 1, kernel.weight_of(layer, "w2")[0].shape[0]
    ids = torch.arange(tokens * chosen, dtype=torch.int32, device=x.device).view(tokens, chosen) % experts
    weights = torch.zeros(tokens, chosen, dtype=torch.float32, device=x.device)
    on_input = mixture.config.apply_router_weight_on_input
    kernel.apply_experts(layer, x, weights, ids, mixture.activation, on_input, None, None)
    return 1
