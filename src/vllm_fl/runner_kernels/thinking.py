"""PyTorch forms of the kernels that end a request's thinking at its budget, by forcing the tokens of its end marker.

Only requests with a budget are looked at, one by one: markers are a few tokens, and texts are searched once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

FORCED = 1.0e9
"""The logit of a token that has to come."""


def update_committed_marker_cache(
    requests: Tensor,
    budgets: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    total_len: Tensor,
    last_start: Tensor,
    last_end: Tensor,
    scanned: Tensor,
    start_ids: Tensor,
    natural_end_ids: Tensor,
    **_: Any,
) -> None:
    """Note where each request's text last begins and ends to think, from where it was searched before."""
    start, end = start_ids.tolist(), natural_end_ids.tolist()
    for state in requests.tolist():
        if int(budgets[state]) < 0:
            continue
        length, first = int(total_len[state]), int(scanned[state])
        if first > length:
            first, last_start[state], last_end[state] = 0, -1, -1
        text = all_token_ids[state, :length].tolist()
        for places, marker in ((last_start, start), (last_end, end)):
            if (found := _last(text, marker, first)) >= 0:
                places[state] = found
        scanned[state] = max(length - max(len(start), len(end)) + 1, 0)


def thinking_budget(
    logits: Tensor,
    logits_stride: int,
    idx_mapping: Tensor,
    budgets: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    total_len: Tensor,
    input_ids: Tensor,
    local_positions: Tensor,
    last_start: Tensor,
    last_end: Tensor,
    start_ids: Tensor,
    natural_end_ids: Tensor,
    end_ids: Tensor,
    **_: Any,
) -> None:
    """Force the next token of the end marker in rows of requests at their thinking budget, earlier drafts included."""
    start, natural, end = start_ids.tolist(), natural_end_ids.tolist(), end_ids.tolist()
    for row, state in enumerate(idx_mapping.tolist()):
        if (budget := int(budgets[state])) < 0:
            continue
        length, place = int(total_len[state]), int(local_positions[row])
        text = all_token_ids[state, :length].tolist() + input_ids[row - place + 1 : row + 1].tolist()
        began = max(int(last_start[state]), _last(text, start, length - len(start) + 1))
        ended = max(int(last_end[state]), _last(text, natural, length - len(natural) + 1))
        if began < 0 or began <= ended or len(text) - began - len(start) < budget:
            continue
        begun = max(size for size in range(len(end)) if text[len(text) - size :] == end[:size])
        logits[row, end[begun]] = FORCED


def _last(text: Sequence[int], marker: Sequence[int], first: int) -> int:
    """The last place from ``first`` on where a text has a marker, or -1."""
    places = range(len(text) - len(marker), max(first, 0) - 1, -1)
    return next((place for place in places if text[place : place + len(marker)] == marker), -1)
