"""PyTorch forms of the kernels that say how likely tokens were. Logits are ``[rows, vocabulary]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .rows import rows_of

ROWS = 64
"""Rows that are in float32 at a time."""


def topk_log_softmax(
    output: Tensor, logits: Tensor, stride: int, topk_ids: Tensor, topk_ids_stride: int, topk: int, size: int, **_: Any
) -> None:
    """The log-probabilities of the tokens in ``topk_ids``, float32 ``[rows, topk]``."""
    for first in range(0, len(logits), ROWS):
        chunk = slice(first, first + ROWS)
        values = logits[chunk, :size].float()
        chosen = values.gather(1, topk_ids[chunk, :topk].to(torch.int64))
        output.view(-1, topk)[chunk] = chosen - values.logsumexp(-1, keepdim=True)


def ranks(output: Tensor, logits: Tensor, stride: int, token_ids: Tensor, size: int, **_: Any) -> None:
    """The number of tokens that are at least as likely as the one in ``token_ids``, int64 ``[rows]``."""
    chosen = logits.gather(1, token_ids.to(torch.int64)[:, None])
    output.copy_((logits[:, :size] >= chosen).sum(-1))


def fill_logprob_token_ids(
    token_ids: Tensor,
    token_ids_stride: int,
    valid: Tensor,
    valid_stride: int,
    sampled: Tensor,
    topk: Tensor,
    topk_stride: int,
    idx_mapping: Tensor,
    num_own: Tensor,
    own: Tensor,
    own_stride: int,
    *,
    NUM_TOPK: int,
    **_: Any,
) -> None:
    """List the tokens to score: the chosen one, then a request's own, or else the most likely ones."""
    token_ids[:, 0] = sampled
    valid[:, 0] = True
    state = idx_mapping[: len(token_ids)].to(torch.int64)
    column = torch.arange(token_ids.shape[1] - 1, device=token_ids.device)
    count = num_own[state][:, None]
    asked = column < torch.where(count > 0, count, NUM_TOPK)
    tokens = own[state][:, : len(column)].to(torch.int64)
    tokens = torch.nn.functional.pad(tokens, (0, len(column) - tokens.shape[1]))
    if NUM_TOPK:
        likely = torch.nn.functional.pad(topk[:, : len(column)].to(torch.int64), (0, max(0, len(column) - NUM_TOPK)))
        tokens = torch.where(count > 0, tokens, likely)
    token_ids[:, 1:] = torch.where(asked, tokens, token_ids[:, 1:])
    valid[:, 1:] |= asked


def prompt_logprobs_token_ids(
    token_ids: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    **_: Any,
) -> None:
    """The token that follows each token of a step, int64 ``[tokens]``."""
    state = idx_mapping.to(torch.int64)
    rows = rows_of(query_start_loc, len(state), len(token_ids))
    column = num_computed_tokens[state].to(torch.int64)[rows.request] + 1 + rows.offset
    found = all_token_ids[state[rows.request], column.clamp(max=all_token_ids.shape[1] - 1)].to(torch.int64)
    token_ids.copy_(torch.where(rows.inside, found, token_ids))


def compact_sampling_mask(
    logits: Tensor,
    row_stride: int,
    column_stride: int,
    cu_num_logits: Tensor,
    num_sampled: Tensor,
    token_ids: Tensor,
    token_ids_stride: int,
    packed_mask: Tensor,
    packed_mask_stride: int,
    counts: Tensor,
    size: int,
    max_num_kept: int,
    *,
    ROWS_PER_REQUEST: int,
    **_: Any,
) -> None:
    """For each token that was chosen: how many tokens could have been, the first of them, and all of them as bits."""
    row = torch.arange(len(counts), device=counts.device)
    request, place = row // ROWS_PER_REQUEST, row % ROWS_PER_REQUEST
    real = place < num_sampled[request]
    source = (cu_num_logits[request].to(torch.int64) + place).clamp(max=len(logits) - 1)
    kept = logits[source][:, :size].isfinite()
    counts.copy_(torch.where(real, kept.sum(-1), 0))
    order = kept.cumsum(-1) - 1
    column = torch.arange(size, device=row.device).to(token_ids.dtype).expand_as(kept)
    first = token_ids.new_zeros(len(row), max_num_kept + 1)
    first.scatter_(1, torch.where(kept, order, max_num_kept).clamp(max=max_num_kept), column)
    listed = torch.arange(max_num_kept, device=row.device) < counts[:, None]
    token_ids[:, :max_num_kept] = torch.where(listed, first[:, :-1], token_ids[:, :max_num_kept])
    bits = torch.nn.functional.pad(kept, (0, -size % 8)).view(len(row), -1, 8).to(torch.int64)
    words = (bits << torch.arange(8, device=bits.device)).sum(-1).to(torch.uint8)
    packed_mask[:, : words.shape[1]] = torch.where(real[:, None], words, packed_mask[:, : words.shape[1]])
