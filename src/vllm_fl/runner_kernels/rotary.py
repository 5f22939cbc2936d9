"""PyTorch form of the kernel that keeps positions of several dimensions (M-RoPE)."""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import rows_of


def prepare_rope_positions(
    positions: Tensor,
    prefill_positions: Tensor,
    prefill_delta: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    prefill_lens: Tensor,
    num_computed_tokens: Tensor,
    NUM_DIMS: int,
) -> None:
    """Write each token's positions, one row per dimension: a prompt's are stored, later ones follow from its last."""
    state = idx_mapping.to(torch.int64)
    computed, delta = num_computed_tokens[state].to(torch.int64), prefill_delta[state].to(torch.int64)
    reading = computed < prefill_lens[state]
    rows = rows_of(query_start_loc, len(state), positions.shape[1])
    place = computed[rows.request] + rows.offset
    column = place.clamp(0, prefill_positions.shape[1] - 1)
    for dimension in range(NUM_DIMS):
        stored = prefill_positions[(state * NUM_DIMS + dimension)[rows.request], column].to(positions.dtype)
        found = torch.where(reading[rows.request], stored, place + delta[rows.request])
        positions[dimension] = torch.where(rows.inside, found, positions[dimension])
