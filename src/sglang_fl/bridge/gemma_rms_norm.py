"""``GemmaRMSNorm``, ``Gemma3RMSNorm`` and ``Gemma4RMSNorm`` over ``gemma_rms_norm``, whose scale is ``1 + weight``.

With a residual both tensors are consumed, as in :mod:`sglang_fl.bridge.rms_norm`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .base import Bridge, Unbridged

OTHER_TYPE = "a residual of another type than its input"


class GemmaRMSNormBridge(Bridge):
    """``forward(x, residual=None, post_residual_addition=None)``."""

    fl_operator = "gemma_rms_norm"

    def forward(
        self, x: Tensor, residual: Tensor | None = None, post_residual_addition: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        layer: Any = self.layer
        if residual is not None:
            if residual.dtype is not x.dtype:
                return self.fall_through(OTHER_TYPE, x, residual, post_residual_addition)
            if post_residual_addition is not None:
                residual = residual + post_residual_addition
        return self.fl_call(x, residual, layer.weight, layer.variance_epsilon)


class Gemma3RMSNormBridge(Bridge):
    """``forward(x, residual=None)``."""

    fl_operator = "gemma_rms_norm"

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        layer: Any = self.layer
        if residual is not None and residual.dtype is not x.dtype:
            return self.fall_through(OTHER_TYPE, x, residual)
        return self.fl_call(x, residual, layer.weight, layer.eps)


class Gemma4RMSNormBridge(Bridge):
    """``forward(x)``; the scale is ``scale_shift + weight``, or one."""

    fl_choices = ("rms_norm", "gemma_rms_norm")

    def __init__(self, layer: Any, *args: Any) -> None:
        if layer.with_scale and layer.scale_shift not in (0.0, 1.0):
            raise Unbridged(f"a scale of {layer.scale_shift} + weight")
        self.fl_operator = "gemma_rms_norm" if layer.with_scale and layer.scale_shift == 1.0 else "rms_norm"
        super().__init__(layer, *args)

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        return self.fl_call(x, None, layer.weight if layer.with_scale else None, layer.eps)
