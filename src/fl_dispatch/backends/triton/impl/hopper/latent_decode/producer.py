"""The producer warps, which copy queries and latent rows into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..aggregates import aggregate
from ..pipeline import publish
from ..rows import copy_layout, copy_rows, copy_tile
from .work import HALF, KEYS, PRODUCER_WARPS, ROTARY, STAGES, find_work


@aggregate
class LatentCache:
    """Latent rows ``[block, slot, rank + rotary]``, and the table of each request's blocks."""

    pointer: gl.tensor
    block_stride: gl.tensor
    slot_stride: gl.tensor
    table: gl.tensor
    table_stride: gl.tensor

    @gluon.jit
    def blocks(self, start, stop, tile, BLOCK_SIZE: gl.constexpr, L: gl.constexpr):
        """Numbers of the blocks with a tile's keys."""
        position = start + tile * KEYS + gl.arange(0, KEYS, layout=L)
        table = self.table + gl.program_id(1).to(gl.int64) * self.table_stride
        return gl.load(table + position // BLOCK_SIZE, mask=(tile >= 0) & (position < stop), other=0).to(gl.int32)

    @gluon.jit
    def rows(self, blocks, position, BLOCK_SIZE: gl.constexpr):
        """Offsets of the keys' rows."""
        return blocks.to(gl.int64) * self.block_stride + (position % BLOCK_SIZE).to(gl.int64) * self.slot_stride


@gluon.jit
def _load_queries(pipeline, query, rotary, work, L: gl.constexpr):
    """Start to copy a program's queries and their rotary parts, if it has keys; rows that do not exist are 0."""
    if work.tiles > 0:
        token, head, valid = work.rows(gl.SliceLayout(1, L))
        rows = query.offsets(work.begin + token, head)
        copy_rows(pipeline.q_left.index(0), query.pointer, rows, valid, 0, HALF, L)
        copy_rows(pipeline.q_right.index(0), query.pointer, rows, valid, HALF, HALF, L)
        rows = rotary.offsets(work.begin + token, head)
        copy_rows(pipeline.q_rotary.index(0), rotary.pointer, rows, valid, 0, ROTARY, L)


@gluon.jit
def produce(config, pipeline, query_starts, lengths, splits, query, rotary, cache, WHICH: gl.constexpr):
    """Fill stage ``WHICH`` with every other tile, from the last to the first, and with zeros beyond the last key.

    The queries go with the first half of the first tile.
    """
    L: gl.constexpr = copy_layout(PRODUCER_WARPS)
    R: gl.constexpr = gl.SliceLayout(1, L)
    left = pipeline.left
    right = pipeline.right
    work = find_work(config, query_starts, lengths, splits)
    n = work.tiles - 1 - WHICH
    blocks = cache.blocks(work.start, work.stop, n, config.block_size, R)
    if WHICH == 0:
        _load_queries(pipeline, query, rotary, work, L)
    phase = 1
    while n >= 0:
        ahead = cache.blocks(work.start, work.stop, n - STAGES, config.block_size, R)
        position = work.start + n * KEYS + gl.arange(0, KEYS, layout=R)
        mask = position < work.stop
        rows = cache.rows(blocks, position, config.block_size)
        left.acquire_stage(WHICH, phase)
        copy_tile(left.tile(WHICH), cache.pointer, rows, mask, 0, HALF, 0, L)
        async_copy.commit_group()
        right.acquire_stage(WHICH, phase)
        copy_tile(right.tile(WHICH), cache.pointer, rows, mask, HALF, HALF, ROTARY, L)
        async_copy.commit_group()
        publish(left.full, WHICH, 1)
        publish(right.full, WHICH, 0)
        blocks = ahead
        n -= STAGES
        phase = phase ^ 1
