"""The CPU backend.

It has no ``gemma_rms_norm``, because the kernels round the scale to the input dtype, and no attention: the compiled
kernels keep keys transposed inside a block and take a schedule that is computed for each batch, so they can share a
cache with no other implementation of ``kv_cache_write`` and ``paged_attention``.
"""

from __future__ import annotations

from fl_dispatch.backends.base import Backend

from . import library
from .impl import activation, normalization, rotary


class CpuBackend(Backend):
    """The compiled CPU kernels of vLLM's CPU build, wherever that build is installed."""

    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_and_mul = staticmethod(activation.gelu_and_mul)
    rms_norm = staticmethod(normalization.rms_norm)
    rotary_embedding = staticmethod(rotary.rotary_embedding)

    @property
    def name(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def vendor(self) -> str:
        """``cpu``."""
        return "cpu"

    def is_available(self) -> bool:
        """Whether the kernels are loaded; the first call in a process loads them."""
        return not library.why_unavailable()

    def why_unavailable(self) -> str:
        """Why they are not."""
        return library.why_unavailable()
