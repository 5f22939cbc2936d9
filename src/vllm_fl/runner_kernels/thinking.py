"""PyTorch forms of the kernels that end a request's thinking at its budget, by forcing the tokens of its end marker.

Only requests with a budget are checked, one by one: markers are a few tokens, and texts are searched once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

FORCED = 1.0e9
"""The logit of a token that has to come."""


def update_committed_marker_cache(
    req_ids: Tensor,
    thinking_token_budget: Tensor,
    all_token_ids: Tensor,
    total_len: Tensor,
    cached_last_start: Tensor,
    cached_last_end: Tensor,
    cached_scan_pos: Tensor,
    reasoning_start_token_ids: Tensor,
    natural_reasoning_end_token_ids: Tensor,
) -> None:
    """Record where each request's text last begins and ends to think, from the previous end of the search."""
    start, end = reasoning_start_token_ids.tolist(), natural_reasoning_end_token_ids.tolist()
    for state in req_ids.tolist():
        if int(thinking_token_budget[state]) < 0:
            continue
        length, first = int(total_len[state]), int(cached_scan_pos[state])
        if first > length:
            first, cached_last_start[state], cached_last_end[state] = 0, -1, -1
        text = all_token_ids[state, :length].tolist()
        for places, marker in ((cached_last_start, start), (cached_last_end, end)):
            if (found := _last(text, marker, first)) >= 0:
                places[state] = found
        cached_scan_pos[state] = max(length - max(len(start), len(end)) + 1, 0)


def thinking_budget(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    thinking_token_budget: Tensor,
    all_token_ids: Tensor,
    total_len: Tensor,
    input_ids: Tensor,
    expanded_local_pos: Tensor,
    cached_last_start: Tensor,
    cached_last_end: Tensor,
    reasoning_start_token_ids: Tensor,
    natural_reasoning_end_token_ids: Tensor,
    reasoning_end_token_ids: Tensor,
) -> None:
    """Force the next token of the end marker in rows of requests at their thinking budget, earlier drafts included."""
    markers = reasoning_start_token_ids, natural_reasoning_end_token_ids, reasoning_end_token_ids
    start, natural, end = (marker.tolist() for marker in markers)
    for row, state in enumerate(expanded_idx_mapping.tolist()):
        if (budget := int(thinking_token_budget[state])) < 0:
            continue
        length, place = int(total_len[state]), int(expanded_local_pos[row])
        text = all_token_ids[state, :length].tolist() + input_ids[row - place + 1 : row + 1].tolist()
        began = max(int(cached_last_start[state]), _last(text, start, length - len(start) + 1))
        ended = max(int(cached_last_end[state]), _last(text, natural, length - len(natural) + 1))
        if began < 0 or began <= ended or len(text) - began - len(start) < budget:
            continue
        begun = max(size for size in range(len(end)) if text[len(text) - size :] == end[:size])
        logits[row, end[begun]] = FORCED


def _last(text: Sequence[int], marker: Sequence[int], first: int) -> int:
    """Return the last place from ``first`` on where a text has a marker, or -1."""
    places = range(len(text) - len(marker), max(first, 0) - 1, -1)
    return next((place for place in places if text[place : place + len(marker)] == marker), -1)
