"""PyTorch forms of the kernels that prepare the inputs of a step, and store its tokens.

An element of ``idx_mapping`` is the number of a request's state; a negative one belongs to no request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import candidate_rows, flat, put, rows_of, take


def prepare_prefill_inputs(
    input_ids: Tensor,
    next_prefill_tokens: Tensor,
    num_lookahead: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    all_token_ids: Tensor,
    prefill_lens: Tensor,
    num_computed_tokens: Tensor,
) -> None:
    """Write the prompts' tokens of this step to ``input_ids``, and the tokens after them to ``next_prefill_tokens``."""
    state, most = idx_mapping.to(torch.int64), all_token_ids.shape[1] - 1
    known = state.clamp(min=0)
    computed, length = take(num_computed_tokens, known).to(torch.int64), take(prefill_lens, known).to(torch.int64)
    reading = (state >= 0) & (computed < length)
    asked = candidate_rows(reading)
    if not len(asked):  # most steps read no prompt, and nothing is left to write
        return
    rows = rows_of(query_start_loc, len(state), len(input_ids))
    column = (take(computed, rows.request) + rows.offset).clamp(0, most)
    tokens = all_token_ids[take(known, rows.request), column].to(input_ids.dtype)
    input_ids.copy_(torch.where(rows.inside & take(reading, rows.request), tokens, input_ids))
    new = query_start_loc[1 : len(state) + 1] - query_start_loc[: len(state)]
    state, computed, length, new, reading = (take(one, asked) for one in (known, computed, length, new, reading))
    step = torch.arange(num_lookahead, device=state.device)[:, None]
    ahead = computed + new + step
    tokens = all_token_ids[state, ahead.clamp(max=most)].masked_fill(ahead >= length, 0)
    put(next_prefill_tokens, step * next_prefill_tokens.stride(0) + state, tokens, reading)


def prepare_pos_seq_lens(
    pos: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    max_num_reqs: int,
) -> None:
    """Write each token's position and each request's length; lengths after the batch become 0."""
    requests = len(idx_mapping)
    computed = take(num_computed_tokens, idx_mapping.to(torch.int64))
    new = query_start_loc[1 : requests + 1] - query_start_loc[:requests]
    seq_lens[:requests] = (computed + new).to(seq_lens.dtype)
    seq_lens[requests:max_num_reqs] = 0
    rows = rows_of(query_start_loc, requests, len(pos))
    found = (take(computed, rows.request) + rows.offset).to(pos.dtype)
    pos.copy_(torch.where(rows.inside, found, pos))


def combine_sampled_and_draft_tokens(
    input_ids: Tensor,
    idx_mapping: Tensor,
    last_sampled_tokens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prefill_len: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    logits_indices: Tensor,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Write the indices of the logits, and the last sampled or drafted tokens to ``input_ids``."""
    requests = len(idx_mapping)
    rows = rows_of(cu_num_logits, requests, len(logits_indices))
    logits = (cu_num_logits[1 : requests + 1] - cu_num_logits[:requests]).to(torch.int64)
    start = query_start_loc[1 : requests + 1].to(torch.int64) - logits
    logits_indices.copy_((take(start, rows.request) + rows.offset).to(logits_indices.dtype))
    state = idx_mapping.to(torch.int64)
    length, prompt = seq_lens[:requests].to(torch.int64), take(prefill_len, state).to(torch.int64)
    drafted = rows.offset - NUM_NEW_SAMPLED_TOKENS
    of_request = take(state, rows.request)
    tokens = take(flat(last_sampled_tokens), of_request).to(torch.int64)
    if draft_tokens.shape[1]:
        draft = draft_tokens[of_request, drafted.clamp(0, draft_tokens.shape[1] - 1)].to(torch.int64)
        tokens = torch.where(drafted >= 0, draft, tokens)
    started = take(torch.stack((length > prompt, length - logits >= prompt)).T, rows.request)
    written = rows.inside & started[:, 0] & ((drafted >= 0) | started[:, 1])
    put(input_ids, logits_indices.to(torch.int64), tokens, written)


def get_num_sampled_and_rejected(
    num_sampled: Tensor,
    num_rejected: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    prefill_len: Tensor,
) -> None:
    """Set ``num_sampled`` to 0 for prompts that are not read to the end, and count the logits that gave no token."""
    requests = len(idx_mapping)
    reading = seq_lens[:requests] < take(prefill_len, idx_mapping.to(torch.int64))
    logits = cu_num_logits[1 : requests + 1] - cu_num_logits[:requests]
    num_sampled[:requests] = num_sampled[:requests].masked_fill(reading, 0)
    num_rejected[:requests] = (logits - num_sampled[:requests]).masked_fill(reading, 0).to(num_rejected.dtype)


def post_update(
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    last_sampled_tokens: Tensor,
    output_bin_counts: Tensor | None,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    all_token_ids: Tensor,
    total_len: Tensor,
    draft_tokens: Tensor | None = None,
    draft_tokens_out: Tensor | None = None,
) -> None:
    """Store a step's tokens in the requests' states."""
    requests, state = len(idx_mapping), idx_mapping.to(torch.int64)
    real, state = state >= 0, state.clamp(min=0)
    count = torch.where(real, num_sampled[:requests].to(torch.int64), 0)
    tokens, computed = sampled_tokens[:requests].to(torch.int64), -num_rejected[:requests].to(torch.int64)
    if query_start_loc is not None:
        computed = computed + (query_start_loc[1 : requests + 1] - query_start_loc[:requests])
    if draft_tokens is not None:
        assert draft_tokens_out is not None
        column = torch.arange(draft_tokens_out.shape[1], device=state.device)
        cell = (state * draft_tokens_out.stride(0))[:, None] + column
        put(draft_tokens_out, cell, draft_tokens[:requests], real[:, None])
    total = take(total_len, state).to(torch.int64)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    new = place < count[:, None]
    put(all_token_ids, (state * all_token_ids.stride(0) + total)[:, None] + place, tokens, new)
    if output_bin_counts is not None:
        cell = torch.where(new, (state * output_bin_counts.stride(0))[:, None] + tokens, 0).flatten()
        flat(output_bin_counts).index_add_(0, cell, new.flatten().to(output_bin_counts.dtype))
    last = tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    put(last_sampled_tokens, state, last, count > 0)
    total_len.index_add_(0, state, count.to(total_len.dtype))
    num_computed_tokens.index_add_(0, state, torch.where(real, computed, 0).to(num_computed_tokens.dtype))


def post_update_num_computed_tokens(idx_mapping: Tensor, num_computed_tokens: Tensor, query_start_loc: Tensor) -> None:
    """Count a step's tokens as computed."""
    requests, state = len(idx_mapping), idx_mapping.to(torch.int64)
    new = torch.where(state >= 0, query_start_loc[1 : requests + 1] - query_start_loc[:requests], 0)
    num_computed_tokens.index_add_(0, state.clamp(min=0), new.to(num_computed_tokens.dtype))


def expand_idx_mapping(
    idx_mapping: Tensor, expanded_idx_mapping: Tensor, expanded_local_pos: Tensor, cu_num_logits: Tensor
) -> None:
    """Write for each row of logits its request's state and its place among that request's rows."""
    rows = rows_of(cu_num_logits, len(idx_mapping), len(expanded_idx_mapping))
    state, offset = idx_mapping[rows.request], rows.offset.to(expanded_local_pos.dtype)
    expanded_idx_mapping.copy_(torch.where(rows.inside, state, expanded_idx_mapping))
    expanded_local_pos.copy_(torch.where(rows.inside, offset, expanded_local_pos))
