"""Forms of the kernels that keep vLLM's block tables.

A kernel gets tables by their addresses; a form gets the tensors themselves, which are remembered where vLLM writes the
addresses down (:func:`remember`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .rows import flat, host, lengths_of, ragged

TENSORS = "fl_tensors"
"""Attribute of a tensor of addresses: the tensors that have them."""


def remember(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the method that writes addresses of tensors into a tensor, so that the result knows them."""

    def made(self: Any, tensors: Iterable[Tensor]) -> Tensor:
        kept = tuple(tensors)
        addresses = make(self, kept)
        setattr(addresses, TENSORS, kept)
        return addresses

    return made


def apply_write(
    output: Tensor,
    output_stride: Any,
    indices: Tensor,
    starts: Tensor,
    contents: Tensor,
    cu_lens: Tensor,
    group_ids: Tensor | None,
    *,
    MULTI_GROUP: bool = False,
    **_: Any,
) -> None:
    """Write runs of ``contents`` into rows of one tensor, or of several by group."""
    which = torch.bucketize(torch.arange(len(contents), device=contents.device), cu_lens.to(torch.int64), right=True)
    first = torch.cat((cu_lens.new_zeros(1), cu_lens[:-1])).to(torch.int64)
    column = starts[which].to(torch.int64) + torch.arange(len(contents), device=contents.device) - first[which]
    row = indices[which].to(torch.int64)
    if not MULTI_GROUP:
        flat(output)[row * int(output_stride) + column] = contents.to(output.dtype)
        return
    assert group_ids is not None
    for group, table in enumerate(getattr(output, TENSORS)):
        mine = group_ids[which] == group
        flat(table)[row[mine] * table.stride(0) + column[mine]] = contents[mine].to(table.dtype)


def gather_block_tables(
    idx_mapping: Tensor,
    source_addresses: Tensor,
    target_addresses: Tensor,
    strides: Tensor,
    num_blocks: Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    num_computed_tokens: Tensor | None = None,
    sliding_window_reach: Tensor | None = None,
    block_sizes: Tensor | None = None,
    *,
    MASK_SLIDING_WINDOW: bool = False,
    **_: Any,
) -> None:
    """Copy the rows of a batch's requests into the tables of the forward pass, and clear the rows behind them."""
    request, counts = host(idx_mapping)[:num_reqs], host(num_blocks)
    pairs = zip(getattr(source_addresses, TENSORS), getattr(target_addresses, TENSORS), strict=True)
    for group, (source, target) in enumerate(pairs):
        column, blocks = np.arange(source.shape[1]), host(source)[request]
        if MASK_SLIDING_WINDOW:
            assert num_computed_tokens is not None
            assert sliding_window_reach is not None
            assert block_sizes is not None
            unread = host(num_computed_tokens)[request] - (reach := int(sliding_window_reach[group]))
            if reach > 0:
                blocks[column < (unread.clip(0) // int(block_sizes[group]))[:, None]] = 0
        filled = column < counts[group, request][:, None]
        np.copyto(host(target)[:num_reqs], blocks, where=filled)
        host(target)[num_reqs:] = 0


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    addresses: Tensor,
    strides: Tensor,
    block_sizes: Tensor,
    enabled: Tensor,
    dcp_sharded: Tensor,
    slot_mappings: Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    *,
    CP_SIZE: int,
    PAD_ID: int,
    **_: Any,
) -> None:
    """The slot of each token's key and value, by group; ``PAD_ID`` where there is none.

    Raises:
        NotImplementedError: context parallelism, which the plugin refuses at start.
    """
    if CP_SIZE != 1:
        raise NotImplementedError("vllm_fl has no slots for context parallelism")
    request = ragged(lengths_of(query_start_loc, len(idx_mapping)))[0]
    state, position = host(idx_mapping)[request], host(positions)[: len(request)]
    nobodys = state < 0
    for group, table in enumerate(getattr(addresses, TENSORS)):
        slots = host(slot_mappings)[group, :max_num_tokens]
        slots[len(request) :] = PAD_ID
        block, place = np.divmod(position, size := int(block_sizes[group]))
        if bool(enabled[group]):
            block = np.minimum(block, table.shape[1] - 1)  # of nobody's tokens, which are not read
            slots[: len(request)] = host(table)[state, block] * np.int64(size) + place
        slots[: len(request)][nobodys | (not bool(enabled[group]))] = PAD_ID
