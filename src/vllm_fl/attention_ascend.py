"""Attention for vLLM on Ascend NPUs, under the name in the specification."""

from __future__ import annotations

from .attention.dense import AttentionFLBackend


class AscendAttentionBackend(AttentionFLBackend):
    """The class that ``attention_backend`` selects if ``vendor.ascend`` is preferred.

    Its operators are dispatched, so another implementation serves what the chip's kernels decline, over the same cache.
    The chosen kernels determine layout and block size.
    """
