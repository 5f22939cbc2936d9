"""PyTorch forms of the kernels that score tokens. Logits are ``[rows, vocabulary]``."""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import rows_of

ROWS = 64
"""Rows that are converted to float32 at a time."""


def topk_log_softmax(output: Tensor, logits: Tensor, topk_ids: Tensor, topk: int, vocab_size: int) -> None:
    """Write the log-probabilities of the tokens in ``topk_ids``, float32 ``[rows, topk]``."""
    for first in range(0, len(logits), ROWS):
        chunk = slice(first, first + ROWS)
        values = logits[chunk, :vocab_size].float()
        chosen = values.gather(1, topk_ids[chunk, :topk].to(torch.int64))
        output.view(-1, topk)[chunk] = chosen - values.logsumexp(-1, keepdim=True)


def ranks(output: Tensor, logits: Tensor, token_ids: Tensor, vocab_size: int) -> None:
    """Write the number of tokens that are at least as likely as the one in ``token_ids``, int64 ``[rows]``."""
    chosen = logits.gather(1, token_ids.to(torch.int64)[:, None])
    output.copy_((logits[:, :vocab_size] >= chosen).sum(-1))


def fill_logprob_token_ids(
    out_token_ids: Tensor,
    out_valid_mask: Tensor,
    sampled_token_ids: Tensor,
    topk_indices: Tensor,
    expanded_idx_mapping: Tensor,
    num_per_req_token_ids: Tensor,
    per_req_token_ids: Tensor,
    NUM_TOPK: int,
) -> None:
    """List the tokens to score: the chosen one, then a request's own list, or else the most likely ones."""
    out_token_ids[:, 0] = sampled_token_ids
    out_valid_mask[:, 0] = True
    state = expanded_idx_mapping[: len(out_token_ids)].to(torch.int64)
    column = torch.arange(out_token_ids.shape[1] - 1, device=out_token_ids.device)
    count = num_per_req_token_ids[state][:, None]
    asked = column < torch.where(count > 0, count, NUM_TOPK)
    tokens = per_req_token_ids[state][:, : len(column)].to(torch.int64)
    tokens = torch.nn.functional.pad(tokens, (0, len(column) - tokens.shape[1]))
    if NUM_TOPK:
        likely = torch.nn.functional.pad(
            topk_indices[:, : len(column)].to(torch.int64), (0, max(0, len(column) - NUM_TOPK))
        )
        tokens = torch.where(count > 0, tokens, likely)
    out_token_ids[:, 1:] = torch.where(asked, tokens, out_token_ids[:, 1:])
    out_valid_mask[:, 1:] |= asked


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    all_token_ids: Tensor,
) -> None:
    """Write the token that follows each token of a step, int64 ``[tokens]``."""
    state = idx_mapping.to(torch.int64)
    rows = rows_of(query_start_loc, len(state), len(prompt_logprobs_token_ids))
    column = num_computed_tokens[state].to(torch.int64)[rows.request] + 1 + rows.offset
    found = all_token_ids[state[rows.request], column.clamp(max=all_token_ids.shape[1] - 1)].to(torch.int64)
    prompt_logprobs_token_ids.copy_(torch.where(rows.inside, found, prompt_logprobs_token_ids))


def compact_sampling_mask(
    logits: Tensor,
    cu_num_logits: Tensor,
    num_sampled_tokens: Tensor,
    token_ids: Tensor,
    packed_mask: Tensor,
    counts: Tensor,
    vocab_size: int,
    max_num_kept: int,
    ROWS_PER_REQUEST: int,
) -> None:
    """Write for each chosen token the number of candidates, the first of them, and all of them as bits."""
    row = torch.arange(len(counts), device=counts.device)
    request, place = row // ROWS_PER_REQUEST, row % ROWS_PER_REQUEST
    real = place < num_sampled_tokens[request]
    source = (cu_num_logits[request].to(torch.int64) + place).clamp(max=len(logits) - 1)
    kept = logits[source][:, :vocab_size].isfinite()
    counts.copy_(torch.where(real, kept.sum(-1), 0))
    order = kept.cumsum(-1) - 1
    column = torch.arange(vocab_size, device=row.device).to(token_ids.dtype).expand_as(kept)
    first = token_ids.new_zeros(len(row), max_num_kept + 1)
    first.scatter_(1, torch.where(kept, order, max_num_kept).clamp(max=max_num_kept), column)
    listed = torch.arange(max_num_kept, device=row.device) < counts[:, None]
    token_ids[:, :max_num_kept] = torch.where(listed, first[:, :-1], token_ids[:, :max_num_kept])
    bits = torch.nn.functional.pad(kept, (0, -vocab_size % 8)).view(len(row), -1, 8).to(torch.int64)
    words = (bits << torch.arange(8, device=bits.device)).sum(-1).to(torch.uint8)
    packed_mask[:, : words.shape[1]] = torch.where(real[:, None], words, packed_mask[:, : words.shape[1]])
