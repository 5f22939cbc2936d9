"""PyTorch forms of the kernels that prepare the batches of a draft model: its first step, and later ones.

The draft model gets the target's batch, including rejected drafts, so that vLLM need not know their number. A separate
model also gets one more place per request, for the token after the accepted ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import flat, rows_of, take


def prepare_prefill_inputs(
    last_token_indices: Tensor,
    draft_current_step: Tensor,
    draft_input_ids: Tensor,
    draft_positions: Tensor,
    draft_query_start_loc: Tensor,
    draft_seq_lens: Tensor,
    target_input_ids: Tensor,
    target_positions: Tensor,
    idx_mapping: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_num_reqs: int,
) -> None:
    """Shift each request's tokens by one, so that each is paired with the target's hidden state of the token before.

    Its last token is the sampled one, or the prompt's next one; places of rejected tokens stay unchanged.
    """
    requests, state = len(idx_mapping), idx_mapping.to(torch.int64).clamp(min=0)
    size = min(len(target_input_ids), len(draft_input_ids))
    rows = rows_of(query_start_loc, requests, size)
    start = query_start_loc[: requests + 1].to(torch.int64)
    kept = start[1:] - start[:-1] - num_rejected[:requests]
    sampled, prompt = take(flat(last_sampled), state), take(flat(next_prefill_tokens), state)
    following = torch.where(num_sampled[:requests] > 0, sampled.to(torch.int64), prompt.to(torch.int64))
    length, written = take(kept, rows.request), rows.inside & (rows.offset < take(kept, rows.request))
    shifted = target_input_ids[:size].roll(-1).to(torch.int64)
    tokens = torch.where(rows.offset == length - 1, take(following, rows.request), shifted)
    draft_input_ids[:size] = torch.where(written, tokens.to(draft_input_ids.dtype), draft_input_ids[:size])
    draft_positions[:size] = torch.where(written, target_positions[:size], draft_positions[:size])
    last_token_indices[:requests] = start[:-1] + kept - 1
    last_token_indices[requests:max_num_reqs] = 0
    draft_query_start_loc[:requests] = query_start_loc[:requests]
    draft_query_start_loc[requests : max_num_reqs + 1] = query_start_loc[requests]
    draft_seq_lens[:requests] = seq_lens[:requests]
    draft_seq_lens[requests:max_num_reqs] = 0
    draft_current_step.zero_()


def prepare_decode_inputs(
    draft_tokens: Tensor,
    target_seq_lens: Tensor,
    num_rejected: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    sample_src_positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_model_len: int,
    max_num_reqs: int,
    ADVANCE_DRAFT_POSITIONS: bool = True,
) -> None:
    """Write the batch of the second draft: one token per request, after its last accepted one."""
    requests = len(draft_tokens)
    input_ids[:requests] = draft_tokens.to(input_ids.dtype)
    sample_src_positions[:requests] += 1
    seq_lens[:requests] = target_seq_lens[:requests] - num_rejected[:requests]
    seq_lens[requests:max_num_reqs] = 0
    if ADVANCE_DRAFT_POSITIONS:
        _advance(positions[:requests], seq_lens[:requests], max_model_len)
    place = torch.arange(max_num_reqs + 1, device=query_start_loc.device)
    query_start_loc[: max_num_reqs + 1] = place.clamp(max=requests).to(query_start_loc.dtype)


def update_draft_inputs(
    output_draft_tokens: Tensor,
    next_input_hidden_states: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    sample_src_positions: Tensor,
    seq_lens: Tensor,
    draft_tokens: Tensor,
    current_draft_step: Tensor,
    hidden_states: Tensor,
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    ADVANCE_DRAFT_POSITIONS: bool = True,
) -> None:
    """Store a step's drafts, and write the batch of the next step if there is one."""
    requests, step = len(draft_tokens), current_draft_step.view(1).to(torch.int64)
    output_draft_tokens[:requests].index_copy_(1, step, draft_tokens[:, None].to(output_draft_tokens.dtype))
    more = step < num_speculative_steps - 1
    sample_src_positions[:requests] += more
    input_ids[:requests] = torch.where(more, draft_tokens.to(input_ids.dtype), input_ids[:requests])
    following = next_input_hidden_states[:requests, :hidden_size]
    following.copy_(torch.where(more, hidden_states[:requests], following))
    if ADVANCE_DRAFT_POSITIONS:
        _advance(positions[:requests], seq_lens[:requests], max_model_len, more)


def _advance(positions: Tensor, seq_lens: Tensor, max_model_len: int, by: Tensor | int = 1) -> None:
    """Advance by ``by`` tokens in place; a request at the maximum length stays, because its drafts are never used."""
    positions.copy_((positions + by).clamp(max=max_model_len - 1))
    seq_lens.copy_((seq_lens + by).clamp(max=max_model_len))


def expand_prefill_inputs(
    target_input_ids: Tensor,
    target_positions: Tensor,
    last_sampled: Tensor,
    idx_mapping: Tensor,
    out_input_ids: Tensor,
    out_positions: Tensor,
    last_token_indices: Tensor,
    out_query_start_loc: Tensor,
    out_seq_lens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_rejected: Tensor,
    max_num_reqs: int,
    max_model_len: int,
) -> None:
    """Write the first batch of a separate model: each request's accepted tokens, the sampled one, and zeros."""
    requests = len(idx_mapping)
    start = query_start_loc[: requests + 1].to(torch.int64)
    begin = start + torch.arange(requests + 1, device=start.device)
    size = min(len(target_input_ids) + requests, len(out_input_ids))
    rows = rows_of(begin, requests, size)
    kept = start[1:] - start[:-1] - num_rejected[:requests]
    source = (take(start, rows.request) + rows.offset).clamp(max=len(target_input_ids) - 1)
    sampled = take(flat(last_sampled), idx_mapping.to(torch.int64).clamp(min=0)).to(out_input_ids.dtype)
    length = take(kept, rows.request)
    tokens = target_input_ids[source].to(out_input_ids.dtype).masked_fill(rows.offset > length, 0)
    tokens = torch.where(rows.offset == length, take(sampled, rows.request), tokens)
    first = take(target_positions, start[:-1].clamp(max=len(target_positions) - 1))
    place = (take(first, rows.request) + rows.offset).clamp(max=max_model_len - 1)
    out_input_ids[:size] = torch.where(rows.inside, tokens, out_input_ids[:size])
    out_positions[:size] = torch.where(rows.inside, place.to(out_positions.dtype), out_positions[:size])
    last_token_indices[:requests] = begin[:-1] + kept
    last_token_indices[requests:max_num_reqs] = 0
    out_query_start_loc[: requests + 1] = begin.to(out_query_start_loc.dtype)
    out_query_start_loc[requests + 1 : max_num_reqs + 1] = begin[-1]
    out_seq_lens[:requests] = (seq_lens[:requests] + 1).clamp(max=max_model_len)
    out_seq_lens[requests:max_num_reqs] = 0
