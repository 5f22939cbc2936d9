"""The reference backend."""

from __future__ import annotations

from fl_dispatch.backends.base import Backend

from . import activation, attention, normalization, rotary


class ReferenceBackend(Backend):
    """Every declared operator in plain PyTorch. Half types are computed in float32; float32 and float64 stay."""

    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_and_mul = staticmethod(activation.gelu_and_mul)
    rms_norm = staticmethod(normalization.rms_norm)
    gemma_rms_norm = staticmethod(normalization.gemma_rms_norm)
    rotary_embedding = staticmethod(rotary.rotary_embedding)
    kv_cache_write = staticmethod(attention.kv_cache_write)
    paged_attention = staticmethod(attention.paged_attention)

    @property
    def name(self) -> str:
        """``reference``."""
        return "reference"
