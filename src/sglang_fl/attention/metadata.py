"""A step's batch for all attention layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionFLMetadata:
    """The batch of a step.

    Args:
        query_start_loc: ``[requests + 1]`` int32; first token of each request.
        seq_lens: ``[requests]`` int32; tokens of each request in the cache, including the new ones.
        block_table: ``[requests, pages]`` int32.
        query_start_loc_host, seq_lens_host: the numbers in these tensors; ``None`` if SGLang's host copies are not
            exact.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int
    query_start_loc_host: list[int] | None = None
    seq_lens_host: list[int] | None = None
