"""A decoding batch in tensors at the addresses that captured graphs hold: a replay reads their latest content."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GraphBatch:
    """Tensors for the largest captured batch.

    Args:
        query_start_loc: ``[requests + 1]`` int32; each request has one new token, so it never changes.
        seq_lens: ``[requests]`` int32.
        block_table: ``[requests, pages]`` int32; entries after a request's pages are stale.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor

    @classmethod
    def make(cls, requests: int, pages: int, device: torch.device | str) -> GraphBatch:
        """Return a batch of requests with one token each, in page 0."""
        return cls(
            torch.arange(requests + 1, dtype=torch.int32, device=device),
            torch.ones(requests, dtype=torch.int32, device=device),
            torch.zeros(requests, pages, dtype=torch.int32, device=device),
        )

    def write(self, seq_lens: Tensor, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write a batch; return views of the parts that its graph reads, in the order of the fields.

        Args:
            seq_lens: ``[requests]`` of any integer type.
            pages: ``[requests, pages of the longest]`` of any integer type.
        """
        requests = seq_lens.shape[0]
        self.seq_lens[:requests].copy_(seq_lens)
        self.block_table[:requests, : pages.shape[1]].copy_(pages)
        return self.query_start_loc[: requests + 1], self.seq_lens[:requests], self.block_table[:requests]
