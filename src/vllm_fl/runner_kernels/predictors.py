"""PyTorch forms of the kernels for several predictors of one model, each of which drafts one token (MTP).

A later predictor's keys and values of rejected drafts are stale, so it reads the tokens before them again: those of the
step before, which are kept, precede a request's own tokens. The forms process one request after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def _requests(idx_mapping: Tensor, count: int) -> Iterator[tuple[int, int]]:
    """Yield the batch row and the state row of each real request."""
    for row, state in enumerate(idx_mapping[:count].tolist()):
        if state >= 0:
            yield row, state


def _spans(idx_mapping: Tensor, starts: list[int], num_rejected: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield for each real request its batch row and state row, its first token, its first new token, and the end.

    Tokens before the first new one are read again.
    """
    count = len(idx_mapping)
    rejected = num_rejected[:count].tolist()
    for row, state in _requests(idx_mapping, count):
        begin = starts[row] + max(0, rejected[row] - 1)
        yield row, state, starts[row], begin, begin + starts[row + 1] - starts[row] - rejected[row]


def prepare_input_buffers(
    last_token_indices: Tensor,
    draft_input_ids: Tensor,
    draft_positions: Tensor,
    draft_seq_lens: Tensor,
    target_input_ids: Tensor,
    target_positions: Tensor,
    cached_draft_input_ids: Tensor,
    draft_input_id_overrides: Tensor,
    idx_mapping: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    target_seq_lens: Tensor,
    query_start_loc: Tensor,
    max_num_reqs: int,
    num_speculative_steps: int,
) -> None:
    """Write tokens, positions and lengths for the first predictor, each request's tokens shifted by one."""
    count = len(idx_mapping)
    starts = query_start_loc[: count + 1].tolist()
    for row, state, start, begin, end in _spans(idx_mapping, starts, num_rejected):
        again, sampled, last = begin - start, int(num_sampled[row]) > 0, end - 1
        draft_seq_lens[row] = target_seq_lens[row] - again
        following = next_prefill_tokens[:, state]
        draft_input_id_overrides[row] = (
            -1 if sampled else following[1:num_speculative_steps].to(draft_input_id_overrides.dtype)
        )
        draft_input_ids[begin:last] = target_input_ids[start + 1 : end - again]
        last_token_indices[row] = last
        draft_input_ids[last] = (last_sampled[state] if sampled else following[:1]).to(draft_input_ids.dtype).squeeze()
        draft_positions[begin:end] = target_positions[start : end - again]
        if again:
            first = int(target_positions[start])
            draft_input_ids[start:begin] = cached_draft_input_ids[state, num_speculative_steps - 1 - again :].to(
                draft_input_ids.dtype
            )
            for place in range(again):
                draft_positions[start + place] = first - again + place
    query_start_loc[count : max_num_reqs + 1] = starts[-1]
    draft_seq_lens[count:max_num_reqs] = 0
    last_token_indices[count:max_num_reqs] = 0


def prepare_hidden_states(
    draft_input_hidden_states: Tensor,
    target_hidden_states: Tensor,
    cached_target_hidden_states: Tensor,
    input_embeds: Tensor | None,
    cached_draft_input_embeds: Tensor | None,
    idx_mapping: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor,
    num_speculative_steps: int,
) -> None:
    """Write the target's hidden states for the first predictor, after those that are read again."""
    starts = query_start_loc[: len(idx_mapping) + 1].tolist()
    for _, state, start, begin, end in _spans(idx_mapping, starts, num_rejected):
        again = begin - start
        draft_input_hidden_states[begin:end] = target_hidden_states[start : end - again]
        if again:
            first = num_speculative_steps - 1 - again
            draft_input_hidden_states[start:begin] = cached_target_hidden_states[state, first:]
            if input_embeds is not None and cached_draft_input_embeds is not None:
                input_embeds[start:begin] = cached_draft_input_embeds[state, first:]


def pad_trailing_slots(slot_mappings: Tensor, query_start_loc: Tensor, last_token_indices: Tensor, PAD_ID: int) -> None:
    """Set the slots after a request's last token to be skipped."""
    ends = query_start_loc[1 : len(last_token_indices) + 1].tolist()
    for last, end in zip(last_token_indices.tolist(), ends, strict=True):
        slot_mappings[:, last + 1 : end] = PAD_ID


def cache_inputs(
    draft_input_ids: Tensor,
    draft_input_embeds: Tensor | None,
    draft_input_hidden_states: Tensor,
    cached_draft_input_ids: Tensor,
    cached_draft_input_embeds: Tensor | None,
    cached_target_hidden_states: Tensor,
    idx_mapping: Tensor,
    last_token_indices: Tensor,
    query_start_loc: Tensor,
    num_speculative_steps: int,
) -> None:
    """Keep each request's last tokens for the next step, with their hidden states and embeddings."""
    kept, count = num_speculative_steps - 1, len(idx_mapping)
    starts, ends = query_start_loc[:count].tolist(), last_token_indices[:count].tolist()
    for row, state in _requests(idx_mapping, count):
        begin, end = max(ends[row] - kept + 1, starts[row]), ends[row] + 1
        first = begin - (ends[row] - kept + 1)
        cached_draft_input_ids[state, first:] = draft_input_ids[begin:end].to(cached_draft_input_ids.dtype)
        cached_target_hidden_states[state, first:] = draft_input_hidden_states[begin:end]
        if draft_input_embeds is not None and cached_draft_input_embeds is not None:
            cached_draft_input_embeds[state, first:] = draft_input_embeds[begin:end]


def shift_input_ids(
    input_ids: Tensor, idx_mapping: Tensor, query_start_loc: Tensor, last_token_indices: Tensor, draft_tokens: Tensor
) -> None:
    """Shift each request's tokens by one, and append its draft."""
    _shift(input_ids, draft_tokens.to(input_ids.dtype), idx_mapping, query_start_loc, last_token_indices)


def shift_input_embeds(
    input_embeds: Tensor, draft_embeds: Tensor, idx_mapping: Tensor, query_start_loc: Tensor, last_token_indices: Tensor
) -> None:
    """Shift each request's embeddings by one, and append that of its draft."""
    _shift(input_embeds, draft_embeds, idx_mapping, query_start_loc, last_token_indices)


def _shift(rows: Tensor, added: Tensor, idx_mapping: Tensor, query_start_loc: Tensor, last: Tensor) -> None:
    count = len(idx_mapping)
    starts, ends = query_start_loc[:count].tolist(), last[:count].tolist()
    for row, _ in _requests(idx_mapping, count):
        start, end = starts[row], ends[row]
        rows[start:end] = rows[start + 1 : end + 1].clone()
        rows[end] = added[row]
