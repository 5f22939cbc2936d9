"""Attention without a cache by an operator over caches: each token is a block of its own, in place, without a copy."""

from __future__ import annotations

import torch
from torch import Tensor


def token_blocks(starts: Tensor, longest: int, tokens: int) -> Tensor:
    """A block table ``[requests, longest]`` int32 for blocks of one token: the batch's tokens in their order.

    Args:
        starts: ``[requests + 1]`` int32; first token of each request.
        longest: tokens of a request, or more.
        tokens: of the batch.
    """
    inside = torch.arange(longest, dtype=torch.int32, device=starts.device)
    return (starts[:-1, None] + inside).clamp_(max=max(tokens - 1, 0))
