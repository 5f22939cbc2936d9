"""The FlagGems backend.

It leaves out what FlagGems 5.0.2 gets wrong or does not have: its cache write ignores the strides of a cache whose
heads lie before its slots, and it has no latent attention with our arguments.
"""

from __future__ import annotations

from fl_dispatch.backends.base import Backend

from . import library
from .impl import activation, experts, normalization, rotary


class FlagGemsBackend(Backend):
    """FlagGems, wherever it is installed (``pip install --no-deps flag-gems``: it pins an old NumPy)."""

    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_and_mul = staticmethod(activation.gelu_and_mul)
    rms_norm = staticmethod(normalization.rms_norm)
    rotary_embedding = staticmethod(rotary.rotary_embedding)
    topk_softmax = staticmethod(experts.topk_softmax)
    moe_sum = staticmethod(experts.moe_sum)

    @property
    def name(self) -> str:
        """``flaggems``."""
        return "flaggems"

    def is_available(self) -> bool:
        """Whether FlagGems and a GPU are there."""
        return not self.why_unavailable()

    def why_unavailable(self) -> str:
        """Why not."""
        return library.why_unavailable()
