"""The producer warps, which copy queries and latent rows into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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
    def request(self, work):
        """Return the index of the request with an item's keys."""
        return work.request

    @gluon.jit
    def blocks(self, work, request, tile, BLOCK_SIZE: gl.constexpr, L: gl.constexpr):
        """Numbers of the blocks with a tile's keys."""
        position = work.start + tile * KEYS + gl.arange(0, KEYS, layout=L)
        table = self.table + request.to(gl.int64) * self.table_stride
        return gl.load(table + position // BLOCK_SIZE, mask=(tile >= 0) & (position < work.stop), other=0).to(gl.int32)

    @gluon.jit
    def rows(self, blocks, position, BLOCK_SIZE: gl.constexpr):
        """Offsets of the keys' rows."""
        return blocks.to(gl.int64) * self.block_stride + (position % BLOCK_SIZE).to(gl.int64) * self.slot_stride


@gluon.jit
def _load_queries(pipeline, query, rotary, work, L: gl.constexpr):
    """Start to copy an item's queries and their rotary parts, if it has keys; rows that do not exist are 0."""
    if work.tiles > 0:
        token, head, valid = work.rows(gl.SliceLayout(1, L))
        rows = query.offsets(work.begin + token, head)
        copy_rows(pipeline.q_left.index(0), query.pointer, rows, valid, 0, HALF, L)
        copy_rows(pipeline.q_right.index(0), query.pointer, rows, valid, HALF, HALF, L)
        rows = rotary.offsets(work.begin + token, head)
        copy_rows(pipeline.q_rotary.index(0), rotary.pointer, rows, valid, 0, ROTARY, L)


@gluon.jit
def _produce_item(config, pipeline, items, item, query, rotary, cache, phase, q_phase, WHICH: gl.constexpr):
    """Fill stage ``WHICH`` with an item's tiles; return the new phases of the stage and the queries."""
    L: gl.constexpr = copy_layout(PRODUCER_WARPS)
    R: gl.constexpr = gl.SliceLayout(1, L)
    left = pipeline.left
    right = pipeline.right
    work = find_work(config, items, item)
    request = cache.request(work)
    n = work.tiles - 1 - WHICH
    blocks = cache.blocks(work, request, n, config.block_size, R)
    if WHICH == 0:
        if config.persistent:
            mbarrier.wait(pipeline.q_free, q_phase, pred=n >= 0)
            q_phase = gl.where(n >= 0, q_phase ^ 1, q_phase)
        _load_queries(pipeline, query, rotary, work, L)
    while n >= 0:
        ahead = cache.blocks(work, request, n - STAGES, config.block_size, R)
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
    return phase, q_phase


@gluon.jit
def produce(config, pipeline, items, query, rotary, cache, WHICH: gl.constexpr):
    """Fill stage ``WHICH`` with every other tile, from the last to the first, and with zeros beyond the last key.

    The queries of an item go with the first half of its first tile, once both consumers have the scores of the item
    before it; so its copies run while the last results are computed and written.
    """
    first = gl.program_id(0)
    phase = gl.to_tensor(1)
    q_phase = phase + 0
    if config.persistent:
        for item in range(first, items.number(), gl.num_programs(0)):
            phase, q_phase = _produce_item(
                config, pipeline, items, item, query, rotary, cache, phase, q_phase, WHICH
            )  # fmt: skip
    else:
        _produce_item(config, pipeline, items, first, query, rotary, cache, phase, q_phase, WHICH)
