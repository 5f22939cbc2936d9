"""Emulated filters of logits."""

from __future__ import annotations

import torch

from . import FLOAT, kernel, require, require_dtype


@kernel("npu_top_k_top_p")
def top_k_top_p(logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None) -> torch.Tensor:
    """Logits below the k-th largest, and then those of the smallest sum up to 1 - p, become -inf.

    Source: op-plugin's page. Refused: k that is not int32 or not from 1 to 1024 (or the vocabulary), p of another
    dtype than the logits' or not from 0 to 1. Assumed: float32 inside; None skips a filter, as the schema allows.
    """
    require_dtype("logits", logits, FLOAT)
    require(logits.dim() == 2, f"logits have {logits.dim()} dimensions, not 2")
    rows, words = logits.shape
    values, order = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        require(k.dtype == torch.int32, f"k is {k.dtype}, not int32")
        require(k.shape == (rows,), f"k is {tuple(k.shape)}, not [{rows}]")
        require(bool(((k >= 1) & (k <= min(1024, words))).all()), f"k must be from 1 to {min(1024, words)}")
        least = values.gather(1, words - k.long()[:, None])
        values = values.masked_fill(values < least, -torch.inf)
    if p is not None:
        require(p.dtype == logits.dtype, f"p is {p.dtype}, logits {logits.dtype}")
        require(p.shape == (rows,), f"p is {tuple(p.shape)}, not [{rows}]")
        require(bool(((p >= 0) & (p <= 1)).all()), "p must be from 0 to 1")
        dropped = values.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        dropped[:, -1] = False
        values = values.masked_fill(dropped, -torch.inf)
    return torch.empty_like(values).scatter_(1, order, values).to(logits.dtype)
