"""The Triton backend: every operator as a kernel of our own. Importing it imports Triton."""

from __future__ import annotations

from fl_dispatch.backends.base import Backend

from .impl import activation, attention, cache, normalization, rotary


class TritonBackend(Backend):
    """Hardware-neutral kernels in plain Triton."""

    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_and_mul = staticmethod(activation.gelu_and_mul)
    rms_norm = staticmethod(normalization.rms_norm)
    gemma_rms_norm = staticmethod(normalization.gemma_rms_norm)
    rotary_embedding = staticmethod(rotary.rotary_embedding)
    kv_cache_write = staticmethod(cache.kv_cache_write)
    paged_attention = staticmethod(attention.paged_attention)

    @property
    def name(self) -> str:
        """``triton``."""
        return "triton"
