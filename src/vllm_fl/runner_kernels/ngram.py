"""PyTorch forms of the kernels that find drafts in a request's own text, after an earlier place of its last tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def scan(
    token_ids: Tensor,
    idx_mapping: Tensor,
    total_len: Tensor,
    num_sampled: Tensor,
    scratch: Tensor,
    L: int,
    MIN_N: int,
    MAX_N: int,
) -> None:
    """Write each request's best match, the last one among the longest: ``length * (longest + 1) + place + 1``.

    The match goes to the first column of ``scratch``; 0 is no match.
    """
    state = idx_mapping.to(torch.int64)
    length = total_len[state].to(torch.int64)
    able = (num_sampled[: len(state)] > 0) & (length >= MIN_N)
    text = token_ids[state, : int(length.max()) if length.get_device() < 0 else L]
    place = torch.arange(text.shape[1], device=text.device)
    best = torch.zeros_like(text, dtype=torch.int64)
    for size in range(MIN_N, min(MAX_N, text.shape[1]) + 1):
        found = (place <= (length - size - 1)[:, None]) & able[:, None]
        for offset in range(size):
            last = text.gather(1, (length - size + offset).clamp(min=0)[:, None])
            found &= torch.nn.functional.pad(text[:, offset:] == last, (0, offset))
        best = torch.where(found, size * (L + 1) + place + 1, best)
    scratch[: len(state)] = 0
    scratch[: len(state), 0] = best.amax(-1)


def finalize(
    token_ids: Tensor,
    idx_mapping: Tensor,
    total_len: Tensor,
    num_sampled: Tensor,
    last_sampled: Tensor,
    scratch: Tensor,
    drafts: Tensor,
    L: int,
) -> None:
    """Copy the tokens after each request's match to its drafts; after the end of the text, its last sampled token."""
    state = idx_mapping.to(torch.int64)
    score = scratch[: len(state)].amax(-1)
    size, place = (score - 1) // (L + 1), (score - 1) % (L + 1)
    first = torch.where(score > 0, size + place, 0)[:, None]
    step = torch.arange(drafts.shape[1], device=drafts.device)
    there = (score > 0) & (num_sampled[: len(state)] > 0)
    there = there[:, None] & (step < total_len[state].to(torch.int64)[:, None] - first)
    found = token_ids[state[:, None], (first + step).clamp(max=L - 1)].to(drafts.dtype)
    drafts[: len(state)] = torch.where(there, found, last_sampled[state][:, None].to(drafts.dtype))
