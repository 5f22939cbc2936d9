"""The warps that bring queries and latent rows into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .latent_schedule import BUFFERS, HALF, KEYS, LOADING_WARPS, ROTARY, piece_of_work, rows_of
from .producer import copy_rows


@gluon.jit
def _table_entries(block_table, start, stop, tile, TABLE_ROW, BLOCK_SIZE: gl.constexpr, L: gl.constexpr):
    """Numbers of the blocks with a tile's keys."""
    position = start + tile * KEYS + gl.arange(0, KEYS, layout=L)
    table = block_table + gl.program_id(1).to(gl.int64) * TABLE_ROW
    return gl.load(table + position // BLOCK_SIZE, mask=(tile >= 0) & (position < stop), other=0).to(gl.int32)


@gluon.jit
def _queries(
    q_left, q_right, q_rotary, query, begin, new, tiles, QUERY_TOKEN, QUERY_HEAD, HEADS: gl.constexpr, L: gl.constexpr
):
    """Start to copy a program's queries, if it has keys; rows that do not exist are 0."""
    if tiles > 0:
        token, head, valid = rows_of(new, HEADS, gl.SliceLayout(1, L))
        rows = (begin + token).to(gl.int64) * QUERY_TOKEN + head.to(gl.int64) * QUERY_HEAD
        copy_rows(q_left.index(0), query, rows, valid, 0, HALF, L)
        copy_rows(q_right.index(0), query, rows, valid, HALF, HALF, L)
        copy_rows(q_rotary.index(0), query, rows, valid, 2 * HALF, ROTARY, L)


@gluon.jit
def load(
    query,
    cache,
    block_table,
    query_starts,
    lengths,
    buffers,
    barriers,
    splits,
    QUERY_TOKEN,
    QUERY_HEAD,
    CACHE_BLOCK,
    CACHE_SLOT,
    TABLE_ROW,
    WHICH: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    DIVIDED: gl.constexpr,
):
    """Fill buffer ``WHICH`` with every other tile, from the last to the first, and with zeros beyond the last key.

    The queries go with the first piece of the first tile.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [LOADING_WARPS, 1], [1, 0])  # 4 rows of 128 bytes a warp
    R: gl.constexpr = gl.SliceLayout(1, L)
    q_left, q_right, q_rotary, left_bufs, right_bufs, rotary_bufs = buffers
    left_full, right_full, left_free, right_free, _scored = barriers
    begin, new, _length, start, stop, tiles, _whole = piece_of_work(
        query_starts, lengths, splits, HEADS, CAUSAL, DIVIDED
    )
    tile = tiles - 1 - WHICH
    entries = _table_entries(block_table, start, stop, tile, TABLE_ROW, BLOCK_SIZE, R)
    if WHICH == 0:
        _queries(q_left, q_right, q_rotary, query, begin, new, tiles, QUERY_TOKEN, QUERY_HEAD, HEADS, L)
    phase = 1
    while tile >= 0:
        ahead = _table_entries(block_table, start, stop, tile - BUFFERS, TABLE_ROW, BLOCK_SIZE, R)
        position = start + tile * KEYS + gl.arange(0, KEYS, layout=R)
        inside = position < stop
        rows = entries.to(gl.int64) * CACHE_BLOCK + (position % BLOCK_SIZE).to(gl.int64) * CACHE_SLOT
        mbarrier.wait(left_free.index(WHICH), phase)
        copy_rows(left_bufs.index(WHICH), cache, rows, inside, 0, HALF, L)
        async_copy.commit_group()
        mbarrier.wait(right_free.index(WHICH), phase)
        copy_rows(right_bufs.index(WHICH), cache, rows, inside, HALF, HALF, L)
        copy_rows(rotary_bufs.index(WHICH), cache, rows, inside, 2 * HALF, ROTARY, L)
        async_copy.commit_group()
        async_copy.wait_group(1)
        fence_async_shared()
        mbarrier.arrive(left_full.index(WHICH))
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(right_full.index(WHICH))
        entries = ahead
        tile -= BUFFERS
        phase = phase ^ 1
