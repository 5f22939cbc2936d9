"""Trees of drafts for operators without masks: each new token is treated as a request with the tokens that it sees."""

from __future__ import annotations

import torch
from torch import Tensor

from .metadata import AttentionFLMetadata


def visible_drafts(slots: Tensor, number: int, branches: int) -> Tensor:
    """Return the drafts of each branch in its own slots, also if another branch has replaced it.

    Args:
        slots: ``[requests, drafts]``.
        number: number of drafts of a branch so far.

    Returns:
        bool ``[requests, branches, drafts]``.
    """
    columns = torch.arange(slots.shape[1], device=slots.device).view(branches, -1)
    sees = torch.zeros(branches, slots.shape[1], dtype=torch.bool, device=slots.device)
    sees.scatter_(1, columns[:, :number], True)
    return sees.expand(slots.shape[0], -1, -1)


def describe(seq_lens: Tensor, known: Tensor, longest: int, sees: Tensor, slots: Tensor) -> AttentionFLMetadata:
    """Describe new tokens; each attends to its request's tokens and to some of the drafts.

    Args:
        seq_lens: ``[requests]``, tokens without drafts.
        known: ``[requests, at most longest]``, the tokens' slots, because pages have one slot.
        longest: tokens of the longest request, including all drafts.
        sees: bool ``[requests, new tokens, drafts]``.
        slots: ``[requests, drafts]``.
    """
    requests, tokens, drafts = sees.shape
    seen, lengths = sees.sum(2), seq_lens[:, None]
    first = sees.to(torch.int8).argsort(dim=2, descending=True, stable=True)  # visible drafts, in their order
    own = slots[:, None].expand(-1, tokens, -1).gather(2, first)
    columns = lengths[..., None] + torch.arange(drafts, device=slots.device)
    known = known.to(torch.int32)
    table = torch.nn.functional.pad(known, (0, longest - known.shape[1]))[:, None].repeat(1, tokens, 1)
    table.scatter_(2, columns.expand(-1, tokens, -1).long(), own.to(torch.int32))
    return AttentionFLMetadata(
        query_start_loc=torch.arange(requests * tokens + 1, dtype=torch.int32, device=slots.device),
        seq_lens=(lengths + seen).flatten().to(torch.int32),
        block_table=table.flatten(0, 1),
        max_query_len=1,
        max_seq_len=longest,
    )
