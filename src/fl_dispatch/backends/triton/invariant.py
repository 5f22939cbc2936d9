"""The batch-invariant form of the kernels whose tiles depend on the batch."""

from __future__ import annotations

from fl_dispatch.backends.base import Backend

from .impl import invariant


class InvariantTritonBackend(Backend):
    """Kernels with one tile for all batches."""

    linear = staticmethod(invariant.linear)
    topk_softmax = staticmethod(invariant.topk_softmax)
    topk_sigmoid = staticmethod(invariant.topk_sigmoid)
    grouped_topk = staticmethod(invariant.grouped_topk)
    fused_moe = staticmethod(invariant.fused_moe)
    paged_attention = staticmethod(invariant.paged_attention)

    @property
    def name(self) -> str:
        """``invariant triton``."""
        return "invariant triton"
