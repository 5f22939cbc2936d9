"""The kernel of :mod:`one_shot`: blocks of two ranks meet once in a sum, and read each other's memory.

A rank's memory has two places for data, which calls use alternately, followed by a flag for each block and rank. A
block writes its part of the tensor into its own rank's memory, and signals the other ranks' blocks of the same number.
It waits for their signals, and adds their parts in the order of the ranks, so that all get the same bits.

No block waits at the end. A rank that overwrites a place has met the others in the call in between, and they make that
call only after they have read the place.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 64
"""Programs of every call, whatever its size: each counts its calls, and the counts must be equal."""
TILE = 4096
"""Elements that a program adds at a time."""
WARPS = 8
NO_WAIT = -(1 << 40) - 1
"""A count of calls below every flag, so that the next call waits for no rank; the next count is even, for the first
place."""
VECTOR = tl.constexpr(8)
"""Elements of a vector: a tensor must be whole vectors, so that memory is read 16 bytes at a time."""


@triton.jit(do_not_specialize=["vectors"])
def _sum(
    x,
    out,
    memories,
    calls,
    vectors,
    PLACE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    call = tl.load(calls + block) + 1
    kind: tl.constexpr = tl.pointer_type(x.dtype.element_ty)
    place = (call % 2) * PLACE
    own = tl.multiple_of((tl.load(memories + RANK) + place).to(kind), 16)
    elements = vectors * VECTOR
    for tile in range(block, tl.cdiv(elements, TILE), blocks):
        offsets = tile * TILE + tl.arange(0, TILE)
        inside = offsets < elements
        tl.store(own + offsets, tl.load(x + offsets, mask=inside), mask=inside)
    tl.debug_barrier()  # all threads have written before one of them says so
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flags = (tl.load(memories + peer) + 2 * PLACE).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(flags + block * RANKS + RANK, call, sem="release", scope="sys")
    flags = (tl.load(memories + RANK) + 2 * PLACE).to(tl.pointer_type(tl.int64))
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            heard = tl.atomic_add(flags + block * RANKS + peer, 0, sem="acquire", scope="sys")
            while heard < call:
                heard = tl.atomic_add(flags + block * RANKS + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    for tile in range(block, tl.cdiv(elements, TILE), blocks):
        offsets = tile * TILE + tl.arange(0, TILE)
        inside = offsets < elements
        total = tl.zeros((TILE,), dtype=tl.float32)
        for peer in tl.static_range(RANKS):
            memory = tl.multiple_of((tl.load(memories + peer) + place).to(kind), 16)
            total += tl.load(memory + offsets, mask=inside, cache_modifier=".cg").to(tl.float32)
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)
    tl.store(calls + block, call)


def add(x: Tensor, out: Tensor, memories: Tensor, calls: Tensor, place: int, rank: int) -> None:
    """Write the sum of a tensor over the ranks, taken in float32. Every rank must call it.

    Args:
        x: contiguous, of a floating type, whole vectors of :data:`VECTOR` elements, at most ``place`` bytes.
        out: overwritten; contiguous, of the shape and dtype of ``x``, or ``x``.
        memories: addresses of all ranks' memories ``[ranks]`` int64, each of ``2 * place`` bytes and ``[BLOCKS,
            ranks]`` int64 flags, initially zero.
        calls: ``[BLOCKS]`` int64, initially zero.
        place: bytes of a place, a multiple of 16.
        rank: this rank's number.
    """
    vectors = x.numel() // VECTOR.value
    sizes = {"PLACE": place, "RANK": rank, "RANKS": memories.numel(), "TILE": TILE}
    _sum[(BLOCKS,)](x, out, memories, calls, vectors, **sizes, num_warps=WARPS)
