"""Attention for vLLM on Ascend NPUs, under the name that the specification gives it."""

from __future__ import annotations

from .attention.dense import AttentionFLBackend


class AscendAttentionBackend(AttentionFLBackend):
    """The class that ``attention_backend`` selects where ``vendor.ascend`` is preferred.

    Its operators are dispatched, so another implementation serves what the chip's kernels decline, over the same cache.
    Layout and block size are those that the chosen kernels require.
    """
