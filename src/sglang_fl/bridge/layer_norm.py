"""``LayerNorm`` over the operator ``layer_norm``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .base import Bridge


class LayerNormBridge(Bridge):
    """``forward(x)``; the layer computes in the type of its weights."""

    fl_operator = "layer_norm"

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        weight = layer.weight if layer.elementwise_affine else None
        bias = layer.bias if layer.use_bias else None
        rounded = x.to(layer.dtype) if layer.dtype.itemsize < x.dtype.itemsize else x
        return self.fl_call(rounded, weight, bias, layer.variance_epsilon).to(x.dtype)
