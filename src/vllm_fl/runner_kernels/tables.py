"""PyTorch forms of the kernels that keep vLLM's block tables.

A kernel gets tables by address; a form gets the tensors, which are kept where vLLM writes down the addresses
(:func:`remember`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .rows import flat, put, rows_of, take

TENSORS = "fl_tensors"
"""Attribute of a tensor of addresses: the tensors at these addresses."""


def remember(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the method that writes addresses of tensors into a tensor, so that the result keeps the tensors."""

    def made(self: Any, tensors: Iterable[Tensor]) -> Tensor:
        kept = tuple(tensors)
        addresses = make(self, kept)
        setattr(addresses, TENSORS, kept)
        return addresses

    return made


def apply_write(
    output: Tensor,
    output_stride: Any,
    write_indices: Tensor,
    write_starts: Tensor,
    write_contents: Tensor,
    write_cu_lens: Tensor,
    write_group_ids: Tensor | None,
    MULTI_GROUP: bool = False,
) -> None:
    """Write runs of ``contents`` into rows of one tensor, or of several by group."""
    place = torch.arange(len(write_contents), device=write_contents.device)
    which = torch.bucketize(place, write_cu_lens.to(torch.int64), right=True)
    first = torch.cat((write_cu_lens.new_zeros(1), write_cu_lens[:-1])).to(torch.int64)
    column = write_starts[which].to(torch.int64) + place - first[which]
    row = write_indices[which].to(torch.int64)
    if not MULTI_GROUP:
        flat(output)[row * int(output_stride) + column] = write_contents.to(output.dtype)
        return
    assert write_group_ids is not None
    for group, table in enumerate(getattr(output, TENSORS)):
        put(table, row * table.stride(0) + column, write_contents, write_group_ids[which] == group)


def gather_block_tables(
    batch_idx_to_req_idx: Tensor,
    src_block_table_ptrs: Tensor,
    dst_block_table_ptrs: Tensor,
    num_blocks: Tensor,
    num_reqs: int,
    num_computed_tokens: Tensor | None = None,
    sliding_window_reach: Tensor | None = None,
    block_sizes: Tensor | None = None,
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Copy the rows of a batch's requests into the tables of the forward pass, and clear the rows after them."""
    request = batch_idx_to_req_idx[:num_reqs].to(torch.int64)
    pairs = zip(getattr(src_block_table_ptrs, TENSORS), getattr(dst_block_table_ptrs, TENSORS), strict=True)
    for group, (source, target) in enumerate(pairs):
        column = torch.arange(source.shape[1], device=source.device)
        blocks = take(source, request)
        if MASK_SLIDING_WINDOW:
            assert num_computed_tokens is not None
            assert sliding_window_reach is not None
            assert block_sizes is not None
            reach = sliding_window_reach[group]
            unread = (num_computed_tokens[request] - reach).clamp(min=0) // block_sizes[group]
            blocks = blocks.masked_fill(column < torch.where(reach > 0, unread, 0)[:, None], 0)
        filled = column < take(num_blocks[group], request)[:, None]
        target[:num_reqs] = torch.where(filled, blocks, target[:num_reqs])
        target[num_reqs:] = 0


def local_lengths(
    out: Tensor, seq_lens: Tensor, dcp_size: int, dcp_rank: int, cp_interleave: int, num_reqs: int, max_num_reqs: int
) -> None:
    """Write the number of each request's tokens on a rank; 0 after the batch."""
    whole = seq_lens[:num_reqs] // (dcp_size * cp_interleave)
    rest = (seq_lens[:num_reqs] % (dcp_size * cp_interleave) - dcp_rank * cp_interleave).clamp(0, cp_interleave)
    out[:num_reqs] = (whole * cp_interleave + rest).to(out.dtype)
    out[num_reqs:max_num_reqs] = 0


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    pos: Tensor,
    block_table_ptrs: Tensor,
    block_sizes: Tensor,
    slot_mapping_enabled: Tensor,
    dcp_sharded: Tensor,
    slot_mappings: Tensor,
    cp_rank: int,
    CP_SIZE: int,
    PAD_ID: int,
    CP_INTERLEAVE: int = 1,
) -> None:
    """Write the slot of each token's key and value, by group; ``PAD_ID`` for none.

    If ``CP_SIZE`` ranks divide a cache, each has ``CP_INTERLEAVE`` tokens in turn.
    """
    tokens = min(len(pos), max_num_tokens)
    rows = rows_of(query_start_loc, len(idx_mapping), tokens)
    state = take(idx_mapping, rows.request).to(torch.int64)
    real, state = rows.inside & (state >= 0), state.clamp(min=0)
    for group, table in enumerate(getattr(block_table_ptrs, TENSORS)):
        size, position = block_sizes[group].to(torch.int64), pos[:tokens].to(torch.int64)
        here = real
        if CP_SIZE != 1:
            turn, beyond = position // CP_INTERLEAVE, position % CP_INTERLEAVE
            here = real & (~dcp_sharded[group] | (turn % CP_SIZE == cp_rank))
            position = torch.where(dcp_sharded[group], turn // CP_SIZE * CP_INTERLEAVE + beyond, position)
        block = torch.where(slot_mapping_enabled[group], position // size, 0).clamp(0, table.shape[1] - 1)
        slot = take(flat(table), state * table.stride(0) + block).to(torch.int64) * size + position % size
        slot_mappings[group, :tokens] = torch.where(here & slot_mapping_enabled[group], slot, PAD_ID)
        slot_mappings[group, tokens:max_num_tokens] = PAD_ID
