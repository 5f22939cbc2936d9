"""``RMSNorm`` and ``RMSNormWithoutScale`` over the operator ``rms_norm``, Gemma's norms over ``gemma_rms_norm``.

With a residual SGLang's compiled kernels write the results into ``x`` and ``residual``, so its models treat both as
consumed, and implementations may overwrite them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_dispatch.hosting.layers.activations import operators_name

from .base import Bridge, Unbridged

OTHER_TYPE = "a residual of another type than its input"


class RMSNormBridge(Bridge):
    """``forward(x, residual=None, post_residual_addition=None, quant_linear=None)``.

    ``cast_x_before_out_mul`` only sets where to round. ``quant_linear`` only permits a quantized result, and SGLang's
    own forward ignores it. ``post_residual_addition`` without a residual has no effect.
    """

    fl_operator = "rms_norm"

    def __init__(self, layer: Any, *args: Any) -> None:
        if layer.variance_size_override is not None:
            raise Unbridged("the mean over a part of the row")
        super().__init__(layer, *args)
        self.reasons: dict[tuple[torch.dtype, torch.dtype | None], str] = {}

    def reason(self, dtype: torch.dtype, residual_dtype: torch.dtype | None) -> str:
        """Return why the operator does not take tensors of these dtypes here; empty if it does."""
        layer: Any = self.layer
        result = layer.override_orig_dtype or dtype
        if layer.cast_x_before_out_mul:
            result = torch.promote_types(result, layer.weight.dtype)
        if result is not dtype:
            return "a result of another type than its input"
        if residual_dtype is not None and layer.fp32_residual and dtype is not torch.float32:
            return "a residual that is returned in float32"
        if residual_dtype not in (None, dtype):
            return OTHER_TYPE
        return ""

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        post_residual_addition: Tensor | None = None,
        quant_linear: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        layer: Any = self.layer
        types = (x.dtype, None if residual is None else residual.dtype)
        reason = self.reasons.get(types)
        if reason is None:
            reason = self.reasons[types] = self.reason(*types)
        if reason:
            return self.fall_through(reason, x, residual, post_residual_addition, quant_linear)
        if residual is not None and post_residual_addition is not None:
            residual = residual + post_residual_addition
        return self.fl_call(x, residual, layer.weight if layer.has_weight else None, layer.variance_epsilon)


class UnscaledRMSNormBridge(Bridge):
    """``RMSNormWithoutScale``: ``forward(x)``."""

    fl_operator = "rms_norm"

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        return self.fl_call(x, None, None, layer.eps)


class GemmaRMSNormBridge(Bridge):
    """``GemmaRMSNorm``: ``forward(x, residual=None, post_residual_addition=None)``; the scale is ``1 + weight``."""

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
    """``Gemma3RMSNorm``: ``forward(x, residual=None)``; the scale is ``1 + weight``."""

    fl_operator = "gemma_rms_norm"

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        layer: Any = self.layer
        if residual is not None and residual.dtype is not x.dtype:
            return self.fall_through(OTHER_TYPE, x, residual)
        return self.fl_call(x, residual, layer.weight, layer.eps)


class Gemma4RMSNormBridge(Bridge):
    """``Gemma4RMSNorm``: ``forward(x)``; the scale is ``scale_shift + weight``, or one."""

    fl_choices = ("rms_norm", "gemma_rms_norm")

    def __init__(self, layer: Any, *args: Any) -> None:
        if layer.with_scale and layer.scale_shift not in (0.0, 1.0):
            raise Unbridged(f"a scale of {layer.scale_shift} + weight")
        self.fl_operator = "gemma_rms_norm" if layer.with_scale and layer.scale_shift == 1.0 else "rms_norm"
        super().__init__(layer, *args)

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        return self.fl_call(x, None, layer.weight if layer.with_scale else None, layer.eps)


class GatedRMSNormBridge(Bridge):
    """``RMSNorm`` of linear attention: ``forward(x, z=None)``, where ``z`` is the gate."""

    fl_operator = "rms_norm_gated"

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        layer: Any = self.layer
        if z is None:
            return self.fall_through("without a gate", x)
        how = operators_name(layer.activation), layer.group_size or 0, layer.norm_before_gate
        # On a GPU the gate of Qwen3.5's prompts is a view of the projection, with a dimension of heads.
        normed: Tensor = self.fl_call(x.reshape(z.shape), z, layer.weight, layer.eps, *how)
        return normed.view(x.shape)


class FusedGatedRMSNormBridge(Bridge):
    """``FusedRMSNormGated``: ``forward(x, g, residual=None, prenorm=False, residual_in_fp32=False)``."""

    fl_operator = "rms_norm_gated"

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor:
        layer: Any = self.layer
        if residual is not None or prenorm:
            return self.fall_through("a residual", x, g, residual, prenorm, residual_in_fp32)
        return self.fl_call(x, g, layer.weight, layer.eps, operators_name(layer.activation))


class StateSpaceNormBridge(Bridge):
    """``Mixer2RMSNormGated``: ``forward(x, gate)``; the gate comes first."""

    fl_operator = "rms_norm_gated"

    def __init__(self, layer: Any, *args: Any) -> None:
        if not layer.use_rms_norm:
            raise Unbridged("a gate without a norm")
        if layer.n_groups % layer.tp_size:
            raise Unbridged("a mean over several ranks")
        super().__init__(layer, *args)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        layer: Any = self.layer
        return self.fl_call(x, gate, layer.weight, layer.variance_epsilon, "silu", layer.group_size, False)


def rms_norm_bridge(
    layer: Any, x: Tensor, residual: Tensor | None = None, post_residual_addition: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the bridge as a function of SGLang's layer. Engines keep one :class:`RMSNormBridge` per layer: faster."""
    try:
        bridge = RMSNormBridge(layer, layer.forward_native)
    except Unbridged:
        return layer.forward_native(x, residual, post_residual_addition)
    return bridge.forward(x, residual, post_residual_addition)
