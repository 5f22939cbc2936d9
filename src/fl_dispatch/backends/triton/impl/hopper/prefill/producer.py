"""The producer warps, which copy queries, keys and values into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..aggregates import aggregate
from ..pipeline import commit, drain
from ..rows import copy_layout, copy_tile
from .config import BLOCK_M, BLOCK_N, PRODUCER_WARPS, STAGES
from .scheduler import send

NO_ROW = gl.constexpr(-16)
"""Sentinel row offset for masked values: negative, 16-aligned."""


@aggregate
class Cache:
    """Keys or values ``[block, slot, head, dim]``."""

    pointer: gl.tensor
    block_stride: gl.tensor
    slot_stride: gl.tensor
    head_stride: gl.tensor


@aggregate
class PageTable:
    """Block numbers of a request's keys."""

    pointer: gl.tensor
    row_stride: gl.tensor
    block_size: gl.constexpr

    @gluon.jit
    def pages(self, request, start_n, length, L: gl.constexpr):
        """Blocks of a tile's keys."""
        position = start_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, L))
        table = self.pointer + gl.cast(request, gl.int64) * self.row_stride
        mask = (position >= 0) & (position < length)
        return gl.load(table + position // self.block_size, mask=mask, other=0).to(gl.int32)

    @gluon.jit
    def rows(self, pages, start_n, length, keys, values, value_offset, OFFSET: gl.constexpr, L: gl.constexpr):
        """Offsets of a tile's keys and values; values that do not exist are at ``NO_ROW``."""
        position = start_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, L))
        slot = position % self.block_size
        key_rows = pages.to(OFFSET) * keys.block_stride + slot * keys.slot_stride
        value_rows = pages.to(OFFSET) * values.block_stride + slot * values.slot_stride
        return key_rows, gl.where(position < length, value_rows + value_offset.to(OFFSET), NO_ROW)


@gluon.jit
def _load_keys(config, pipeline, pending, i, key, rows, start_n, length, L: gl.constexpr):
    """Start to copy the keys of tile ``i``."""
    ring = pipeline.keys
    mask = start_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, L)) < length
    stage = i % ring.stages
    ring.acquire(i)
    copy_tile(ring.tile(stage), key, rows, mask, 0, config.dim, config.rest, L)
    return commit(pipeline.full, pending, ring.offset + stage)


@gluon.jit
def _load_values(config, pipeline, pending, i, value, rows, L: gl.constexpr):
    """Start to copy the values of tile ``i``."""
    ring = pipeline.values
    stage = i % ring.stages
    ring.acquire(i)
    copy_tile(ring.tile(stage), value, rows, rows >= 0, 0, config.dim_v, 0, L)
    return commit(pipeline.full, pending, ring.offset + stage)


@gluon.jit
def _load_queries(config, pipeline, pending, stage, query, queries, L: gl.constexpr):
    """Send a work item, and start to copy its queries into their free stage."""
    ring = pipeline.queries
    send(pipeline.messages.index(stage), queries)
    token = queries.first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    rows = query.offsets(queries.begin + token, queries.head)
    copy_tile(ring.tile(stage), query.pointer, rows, token < queries.new, 0, config.dim, config.rest, L)
    return commit(pipeline.full, pending, ring.offset + stage)


@gluon.jit
def wait_released(keys, tile, i):
    """Wait until the keys of ``tile`` are released, unless a tile before ``i`` has taken their stage already."""
    tile = gl.maximum(tile, -1)
    there = (tile >= 0) & (tile + STAGES >= i)
    keys.wait_released(gl.maximum(tile, 0), there)


@gluon.jit
def produce(config, pipeline, scheduler, query, keys, values, table):
    """Fill the rings: an item's tiles of keys, the last one first, each with the values of the one before.

    Consumers multiply in this order, and the tiles of consecutive items form one sequence: the first keys of an item
    come before the last values of the item before. An item's queries come before its keys if queries have two stages,
    otherwise as soon as the former queries are released. Rows beyond a request's keys are 0.
    """
    OFFSET: gl.constexpr = config.offset_type
    L: gl.constexpr = copy_layout(PRODUCER_WARPS)
    cursor, work = scheduler.next(scheduler.start())
    pages = table.pages(work.index, (work.tiles - 1) * BLOCK_N, work.request.length, L)
    value_rows = gl.full([BLOCK_N], NO_ROW, OFFSET, gl.SliceLayout(1, L))  # of the tile before
    pending = -1  # the stage that is to be published, as an index of ``full``
    i = 0  # tiles so far
    done = 0  # items so far
    former = 0  # tiles before the item before this one
    while work.index < scheduler.requests:
        queries = work.queries()
        length = queries.length
        stage = done % config.query_stages
        kv_head = (queries.head // config.group).to(gl.int64)
        key = keys.pointer + kv_head * keys.head_stride
        value_offset = kv_head * values.head_stride
        # The block numbers of a tile are loaded one tile ahead, those of an item's first tile one item ahead.
        start_n = (work.tiles - 1) * BLOCK_N
        ahead = table.pages(work.index, start_n - BLOCK_N, length, L)
        if config.query_stages > 1:
            wait_released(pipeline.keys, former - 1, i)
            pending = _load_queries(config, pipeline, pending, stage, query, queries, L)
        key_rows, own_rows = table.rows(pages, start_n, length, keys, values, value_offset, OFFSET, L)
        pending = _load_keys(config, pipeline, pending, i, key, key_rows, start_n, length, L)
        if i > 0:
            pending = _load_values(config, pipeline, pending, i - 1, values.pointer, value_rows, L)
            if config.query_stages == 1:
                pending = drain(pipeline.full, pending)
        value_rows = own_rows
        if config.query_stages == 1:
            wait_released(pipeline.keys, i - 1, i)
            pending = _load_queries(config, pipeline, pending, stage, query, queries, L)
        former = i + 0  # Triton 3.6 takes two variables that begin a loop as one value for the same
        i += 1
        cursor, next_work = scheduler.next(cursor)
        pages = table.pages(next_work.index, (next_work.tiles - 1) * BLOCK_N, next_work.request.length, L)
        for _tile in range(1, work.tiles):
            start_n -= BLOCK_N
            later = table.pages(work.index, start_n - BLOCK_N, length, L)
            key_rows, own_rows = table.rows(ahead, start_n, length, keys, values, value_offset, OFFSET, L)
            pending = _load_keys(config, pipeline, pending, i, key, key_rows, start_n, length, L)
            pending = _load_values(config, pipeline, pending, i - 1, values.pointer, value_rows, L)
            value_rows = own_rows
            ahead = later
            i += 1
        work = next_work
        done += 1
    if i > 0:
        pending = _load_values(config, pipeline, pending, i - 1, values.pointer, value_rows, L)
        pending = drain(pipeline.full, pending)
    wait_released(pipeline.keys, (i if config.query_stages == 1 else former) - 1, i)
    stage = done % config.query_stages
    send(pipeline.messages.index(stage), work.queries().nothing())
    mbarrier.arrive(pipeline.full.index(pipeline.queries.offset + stage))
