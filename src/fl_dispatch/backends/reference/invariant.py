"""The batch-invariant form of the operators whose reference is not so on a CPU."""

from __future__ import annotations

from fl_dispatch.backends.base import Backend

from .impl import invariant, invariant_attention, normalization, routing


class InvariantBackend(Backend):
    """Operators of dense models and of mixtures. The norms and the softmax are the reference's: each row by itself."""

    linear = staticmethod(invariant.linear)
    silu_and_mul = staticmethod(invariant.silu_and_mul)
    gelu_and_mul = staticmethod(invariant.gelu_and_mul)
    rms_norm = staticmethod(normalization.rms_norm)
    gemma_rms_norm = staticmethod(normalization.gemma_rms_norm)
    layer_norm = staticmethod(normalization.layer_norm)
    topk_softmax = staticmethod(routing.topk_softmax)
    topk_sigmoid = staticmethod(invariant.topk_sigmoid)
    grouped_topk = staticmethod(invariant.grouped_topk)
    fused_moe = staticmethod(invariant.fused_moe)
    paged_attention = staticmethod(invariant_attention.paged_attention)

    @property
    def name(self) -> str:
        """``invariant``."""
        return "invariant"
