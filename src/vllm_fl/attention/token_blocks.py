"""Attention without a cache by an operator over caches: each token is treated as a block, in place, without a copy."""

from __future__ import annotations

import torch
from torch import Tensor


def token_blocks(starts: Tensor, longest: int, tokens: int) -> Tensor:
    """Return a block table ``[requests, longest]`` int32 for blocks of one token: the batch's tokens in order.

    Args:
        starts: ``[requests + 1]`` int32; first token of each request.
        longest: largest number of tokens of a request, or more.
        tokens: tokens of the batch.
    """
    inside = torch.arange(longest, dtype=torch.int32, device=starts.device)
    return (starts[:-1, None] + inside).clamp_(max=max(tokens - 1, 0))
