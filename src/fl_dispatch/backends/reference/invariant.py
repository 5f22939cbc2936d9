"""Batch-invariant forms of operators with a reference that is not batch-invariant on a CPU."""

from __future__ import annotations

from fl_dispatch.backends.base import Backend
from fl_dispatch.ops.normalization import gemma_rms_norm, layer_norm, rms_norm
from fl_dispatch.ops.routing import topk_softmax

from .impl import invariant, invariant_attention


class InvariantBackend(Backend):
    """Operators of dense and mixture-of-experts models. Norms and softmax are the reference's: they work row by row."""

    linear = staticmethod(invariant.linear)
    silu_and_mul = staticmethod(invariant.silu_and_mul)
    gelu_and_mul = staticmethod(invariant.gelu_and_mul)
    rms_norm = staticmethod(rms_norm.reference)
    gemma_rms_norm = staticmethod(gemma_rms_norm.reference)
    layer_norm = staticmethod(layer_norm.reference)
    topk_softmax = staticmethod(topk_softmax.reference)
    topk_sigmoid = staticmethod(invariant.topk_sigmoid)
    grouped_topk = staticmethod(invariant.grouped_topk)
    fused_moe = staticmethod(invariant.fused_moe)
    paged_attention = staticmethod(invariant_attention.paged_attention)

    @property
    def name(self) -> str:
        """``invariant``."""
        return "invariant"
