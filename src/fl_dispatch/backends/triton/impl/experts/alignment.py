"""Sort (token, choice) pairs by expert for a grouped matrix product, without atomics, so the order is deterministic.

Pairs are divided into chunks. The first kernel counts each chunk's pairs by expert. In the second kernel every program
sums all counts to find the positions of its chunk's pairs, and pads some blocks. Few pairs use only the second kernel,
in which every program counts all pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.ops.moe import aligned_blocks

from ..launch import power_of_two

ELEMENTS = 8192
"""Comparisons of pairs with experts that a program makes at a time."""
MOST_AT_ONCE = 256
"""Most pairs that a program compares with one another at a time."""
MOST_CHUNKS = 128
FEW_TURNS = 4
"""Most turns in which a program counts all pairs, without the first kernel."""
FEW_AT_ONCE = 32
"""Most pairs of a chunk without the first kernel."""


@triton.jit
def _experts(topk_ids, expert_map, pair, pairs, MAPPED: tl.constexpr):
    """Return each pair's expert by its number on this rank; -1 if the expert is on another rank."""
    expert = tl.load(topk_ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
    if MAPPED:
        expert = tl.load(expert_map + expert, mask=expert >= 0, other=-1).to(tl.int32)
    return expert


@triton.jit(do_not_specialize=["pairs", "steps"])
def _count(
    topk_ids,
    expert_map,
    counts,
    pairs,
    steps,
    MAPPED: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Grid: chunks of ``steps`` times ``STEP`` pairs."""
    expert = tl.arange(0, BLOCK_EXPERTS)
    count = tl.zeros([BLOCK_EXPERTS], dtype=tl.int32)
    for step in range(steps):
        pair = (tl.program_id(0) * steps + step) * STEP + tl.arange(0, STEP)
        mine = _experts(topk_ids, expert_map, pair, pairs, MAPPED)
        count += tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0) * BLOCK_EXPERTS + expert, count)


@triton.jit(do_not_specialize=["pairs", "steps", "chunks", "blocks"])
def _place(
    topk_ids,
    expert_map,
    counts,
    sorted_ids,
    expert_ids,
    padded,
    pairs,
    steps,
    chunks,
    blocks,
    MAPPED: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
):
    """Grid: chunks. Every program also pads some blocks, ``BLOCKS`` at a time.

    Unless the first kernel has ``COUNTED`` the pairs, every program counts all of them, ``ALL`` at a time.
    """
    chunk = tl.program_id(0)
    expert = tl.arange(0, BLOCK_EXPERTS)
    before = tl.zeros([BLOCK_EXPERTS], dtype=tl.int32)
    if COUNTED:
        other = tl.arange(0, BLOCK_CHUNKS)[:, None]
        count = tl.load(counts + other * BLOCK_EXPERTS + expert[None, :], mask=other < chunks, other=0)
        total = tl.sum(count, axis=0)
        before = tl.sum(tl.where(other < chunk, count, 0), axis=0)
    else:
        total = before
        for begin in range(0, pairs, ALL):
            pair = begin + tl.arange(0, ALL)
            mine = _experts(topk_ids, expert_map, pair, pairs, MAPPED)
            hit = (mine[:, None] == expert[None, :]).to(tl.int32)
            total += tl.sum(hit, axis=0)
            before += tl.sum(tl.where((pair < chunk * steps * STEP)[:, None], hit, 0), axis=0)
    used = (total + BLOCK_SIZE - 1) // BLOCK_SIZE
    end = tl.cumsum(used, axis=0)
    start = (end - used) * BLOCK_SIZE
    all_used = tl.sum(used, axis=0)
    if chunk == 0:
        tl.store(padded, all_used * BLOCK_SIZE)
    for step in range(steps):
        pair = (chunk * steps + step) * STEP + tl.arange(0, STEP)
        mine = _experts(topk_ids, expert_map, pair, pairs, MAPPED)
        hit = mine[:, None] == expert[None, :]
        first = tl.sum(tl.where(hit, (start + before)[None, :], 0), axis=1)
        earlier = (mine[:, None] == mine[None, :]) & (pair[:, None] > pair[None, :])
        place = first + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(sorted_ids + place, pair, mask=mine >= 0)
        before += tl.sum(hit.to(tl.int32), axis=0)
    place = tl.arange(0, BLOCK_PLACES)[None, :]
    for tile in range(chunk, tl.cdiv(blocks, BLOCKS), chunks):
        block = tile * BLOCKS + tl.arange(0, BLOCKS)
        whose = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), axis=1)
        taken = tl.sum(tl.where(expert[None, :] == whose[:, None], (start + total)[None, :], 0), axis=1)
        tl.store(expert_ids + block, tl.where(block < all_used, whose, -1), mask=block < blocks)
        free = block[:, None] * BLOCK_SIZE + place
        free_here = (free >= taken[:, None]) | (block >= all_used)[:, None]
        tl.store(sorted_ids + free, pairs, mask=free_here & (place < BLOCK_SIZE) & (block < blocks)[:, None])


_launch_count = Launcher(_count)
_launch_place = Launcher(_place)


def moe_align_block_size(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.moe.moe_align_block_size`.

    The compiled code depends on the number of tokens rounded up to a power of two.
    """
    pairs = topk_ids.numel()
    blocks = aligned_blocks(pairs, block_size, num_experts)
    sorted_ids = topk_ids.new_empty(blocks * block_size, dtype=torch.int32)
    expert_ids = topk_ids.new_empty(blocks, dtype=torch.int32)
    padded = topk_ids.new_empty(1, dtype=torch.int32)
    if not pairs:
        return sorted_ids, expert_ids, padded.zero_()
    topk_ids = topk_ids.contiguous()
    mapped = expert_map is not None
    other = topk_ids if expert_map is None else expert_map
    experts = power_of_two(num_experts)
    most_pairs = power_of_two(topk_ids.shape[0]) * topk_ids.shape[1]
    most_blocks = aligned_blocks(most_pairs, block_size, num_experts)
    most_step = max(16, min(MOST_AT_ONCE, ELEMENTS // experts, power_of_two(most_pairs)))
    few = most_pairs <= FEW_TURNS * most_step
    step = min(most_step, FEW_AT_ONCE) if few else most_step
    steps = power_of_two(-(-most_pairs // (step * MOST_CHUNKS)))
    chunks = -(-pairs // (step * steps))
    most_chunks = power_of_two(-(-most_pairs // (step * steps)))
    counts = padded
    if not few:
        counts = topk_ids.new_empty(chunks * experts, dtype=torch.int32)
        _launch_count((chunks, 1, 1), (topk_ids, other, counts), (mapped, step, experts), sizes=(pairs, steps), warps=8)
    _launch_place(
        (chunks, 1, 1),
        (topk_ids, other, counts, sorted_ids, expert_ids, padded),
        (
            mapped,
            not few,
            block_size,
            step,
            most_step,
            experts,
            most_chunks,
            max(1, min(MOST_AT_ONCE, ELEMENTS // experts, power_of_two(-(-most_blocks // most_chunks)))),
            power_of_two(block_size),
        ),
        sizes=(pairs, steps, chunks, blocks),
        warps=4 if few else 8,
    )
    return sorted_ids, expert_ids, padded
