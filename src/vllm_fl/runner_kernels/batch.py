"""Forms of the kernels that prepare the inputs of a step, and take its tokens over.

A row of ``idx_mapping`` is the number of a request's state; a negative one belongs to no request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .rows import flat, host, lengths_of, ragged, rows_of, take


def prepare_prefill_inputs(
    input_ids: Tensor,
    next_prefill_tokens: Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    prefill_lens: Tensor,
    num_computed_tokens: Tensor,
    **_: Any,
) -> None:
    """Write the prompts' tokens of this step to ``input_ids``, and those that follow to ``next_prefill_tokens``."""
    state, most = idx_mapping.to(torch.int64), all_token_ids.shape[1] - 1
    known = state.clamp(min=0)
    computed, length = take(num_computed_tokens, known).to(torch.int64), take(prefill_lens, known).to(torch.int64)
    reading = (state >= 0) & (computed < length)
    if not bool(reading.any()):  # most steps, and nothing below would be written
        return
    rows = rows_of(query_start_loc, len(state), len(input_ids))
    column = (take(computed, rows.request) + rows.offset).clamp(0, most)
    tokens = all_token_ids[take(known, rows.request), column].to(input_ids.dtype)
    input_ids.copy_(torch.where(rows.inside & take(reading, rows.request), tokens, input_ids))
    state, computed, length = state[reading], computed[reading], length[reading]
    new = (query_start_loc[1 : len(idx_mapping) + 1] - query_start_loc[: len(idx_mapping)])[reading]
    ahead = (computed + new)[:, None] + torch.arange(num_lookahead, device=state.device)
    tokens = all_token_ids[state[:, None], ahead.clamp(max=most)]
    next_prefill_tokens[:, state] = tokens.masked_fill(ahead >= length[:, None], 0).T.to(next_prefill_tokens.dtype)


def prepare_pos_seq_lens(
    positions: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    max_num_reqs: int,
    **_: Any,
) -> None:
    """Write each token's position and each request's length; lengths behind the batch become 0."""
    requests = len(idx_mapping)
    new, computed = lengths_of(query_start_loc, requests), host(num_computed_tokens)[host(idx_mapping)]
    lengths = host(seq_lens)
    lengths[:requests] = computed + new
    lengths[requests:max_num_reqs] = 0
    request, offset = ragged(new)
    host(positions)[: len(request)] = computed[request] + offset


def combine_sampled_and_draft_tokens(
    input_ids: Tensor,
    idx_mapping: Tensor,
    last_sampled_tokens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prefill_len: Tensor,
    draft_tokens: Tensor,
    draft_tokens_stride: int,
    cu_num_logits: Tensor,
    logits_indices: Tensor,
    *,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **_: Any,
) -> None:
    """Write the indices of the logits, and the tokens that were sampled or drafted last to ``input_ids``."""
    requests, state = len(idx_mapping), host(idx_mapping)
    logits = lengths_of(cu_num_logits, requests)
    request, offset = ragged(logits)
    place = (host(query_start_loc)[1 : requests + 1] - logits)[request] + offset
    host(logits_indices)[: len(place)] = place
    length, prompt = host(seq_lens)[:requests], host(prefill_len)[state]
    drafted, tokens = offset - NUM_NEW_SAMPLED_TOKENS, host(flat(last_sampled_tokens))[state][request]
    if draft_tokens.shape[1]:
        draft = host(draft_tokens)[state[request], drafted.clip(0, draft_tokens.shape[1] - 1)]
        tokens = np.where(drafted >= 0, draft, tokens)
    generates, from_first = length > prompt, length - logits >= prompt
    written = generates[request] & ((drafted >= 0) | from_first[request])
    host(input_ids)[place[written]] = tokens[written]


def get_num_sampled_and_rejected(
    num_sampled: Tensor,
    num_rejected: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    prefill_len: Tensor,
    **_: Any,
) -> None:
    """Set ``num_sampled`` to 0 where a prompt is not read to its end, and count the logits that gave no token."""
    requests = len(idx_mapping)
    reading = host(seq_lens)[:requests] < host(prefill_len)[host(idx_mapping)]
    sampled, rejected = host(num_sampled)[:requests], host(num_rejected)[:requests]
    sampled[reading] = 0
    rejected[:] = lengths_of(cu_num_logits, requests) - sampled
    rejected[reading] = 0


def post_update(
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    last_sampled_tokens: Tensor,
    output_bin_counts: Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens: Tensor,
    sampled_tokens_stride: int,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    total_len: Tensor,
    draft_tokens: Tensor | None = None,
    draft_tokens_out: Tensor | None = None,
    num_draft_tokens: int = 0,
    **_: Any,
) -> None:
    """Take a step's tokens over into the requests' states."""
    requests = len(idx_mapping)
    state, count, tokens = host(idx_mapping), host(num_sampled)[:requests], host(sampled_tokens)[:requests]
    computed = -host(num_rejected)[:requests]
    if query_start_loc is not None:
        computed = computed + lengths_of(query_start_loc, requests)
    drafts = None if draft_tokens is None else host(draft_tokens)[:requests]
    mine = state >= 0
    if not mine.all():
        state, count, tokens, computed = state[mine], count[mine], tokens[mine], computed[mine]
        drafts = None if drafts is None else drafts[mine]
    if drafts is not None:
        assert draft_tokens_out is not None
        host(draft_tokens_out)[state] = drafts
    request, offset = ragged(count)
    row, written, total = state[request], tokens[request, offset], host(total_len)
    host(all_token_ids)[row, total[row] + offset] = written
    if output_bin_counts is not None:
        np.add.at(host(output_bin_counts), (row, written), 1)
    last = offset + 1 == count[request]
    host(flat(last_sampled_tokens))[row[last]] = written[last]
    total[state] += count
    host(num_computed_tokens)[state] += computed


def post_update_num_computed_tokens(
    idx_mapping: Tensor, num_computed_tokens: Tensor, query_start_loc: Tensor, **_: Any
) -> None:
    """Count a step's tokens as computed."""
    requests, mine = len(idx_mapping), idx_mapping >= 0
    new = (query_start_loc[1 : requests + 1] - query_start_loc[:requests])[mine]
    num_computed_tokens[idx_mapping[mine].to(torch.int64)] += new.to(num_computed_tokens.dtype)


def expand_idx_mapping(
    idx_mapping: Tensor, expanded_idx_mapping: Tensor, expanded_local_pos: Tensor, cu_num_logits: Tensor, **_: Any
) -> None:
    """For each row of logits, its request's state and its place among that request's rows."""
    rows = rows_of(cu_num_logits, len(idx_mapping), len(expanded_idx_mapping))
    state, offset = idx_mapping[rows.request], rows.offset.to(expanded_local_pos.dtype)
    expanded_idx_mapping.copy_(torch.where(rows.inside, state, expanded_idx_mapping))
    expanded_local_pos.copy_(torch.where(rows.inside, offset, expanded_local_pos))
