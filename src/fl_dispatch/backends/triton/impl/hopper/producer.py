"""The warps that bring queries, keys and values into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .schedule import BLOCK_M, BLOCK_N, FAR, STAGES, find_piece, key_tiles, request_span, tell

NONE = gl.constexpr(-16)
"""Where values are that do not exist: negative, and a multiple of what all places are multiples of."""


@gluon.jit
def _hand_over(full, pending, index):
    """Give the consumers buffer ``pending``, and return ``index``, whose copies were just started, to be given next.

    So a buffer is given when the next copies are under way, and behind a fence of the writers: consumers need none.
    """
    async_copy.commit_group()
    async_copy.wait_group(1)
    fence_async_shared()
    mbarrier.arrive(full.index(gl.maximum(pending, 0)), pred=pending >= 0)
    return pending * 0 + index


@gluon.jit
def _hand_over_last(full, pending):
    """Give what is still to be given, once it is there."""
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(full.index(gl.maximum(pending, 0)), pred=pending >= 0)
    return pending * 0 - 1


@gluon.jit
def _pages(block_table, request, start, length, TABLE_ROW, PAGED: gl.constexpr, SIZE: gl.constexpr, L: gl.constexpr):
    """Numbers of the pages with a tile's keys."""
    position = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, L))
    if PAGED:
        table = block_table + gl.cast(request, gl.int64) * TABLE_ROW
        there = (position >= 0) & (position < length)
        position = gl.load(table + position // SIZE, mask=there, other=0).to(gl.int32)
    return position


@gluon.jit
def copy_rows(buffer, source, rows, inside, FIRST: gl.constexpr, SIZE: gl.constexpr, L: gl.constexpr):
    """Start to copy ``SIZE`` elements, from ``FIRST`` on, of each row."""
    column = FIRST + gl.arange(0, SIZE, layout=gl.SliceLayout(0, L))
    async_copy.async_copy_global_to_shared(buffer, source + rows[:, None] + column[None, :], mask=inside[:, None])


@gluon.jit
def _rows(
    pages,
    start,
    length,
    value_offset,
    KEY_BLOCK,
    KEY_SLOT,
    VALUE_BLOCK,
    VALUE_SLOT,
    PAGED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    L: gl.constexpr,
):
    """Where a tile's keys and values begin; values that do not exist have a negative number."""
    position = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, L))
    if PAGED:
        slot = position % BLOCK_SIZE
        key_rows = pages.to(ROW) * KEY_BLOCK + slot * KEY_SLOT
        value_rows = pages.to(ROW) * VALUE_BLOCK + slot * VALUE_SLOT
    else:
        key_rows = position.to(ROW) * KEY_SLOT
        value_rows = position.to(ROW) * VALUE_SLOT
    return key_rows, gl.where(position < length, value_rows + value_offset.to(ROW), NONE)


@gluon.jit
def _keys(
    k_bufs,
    k_rest_bufs,
    full,
    k_free,
    pending,
    i,
    key,
    rows,
    start,
    length,
    DIM: gl.constexpr,
    REST: gl.constexpr,
    L: gl.constexpr,
):
    """Start to copy the keys of tile ``i``."""
    stage = i % STAGES
    inside = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, L)) < length
    mbarrier.wait(k_free.index(stage), ((i // STAGES) & 1) ^ 1)
    copy_rows(k_bufs.index(stage), key, rows, inside, 0, DIM, L)
    if REST > 0:
        copy_rows(k_rest_bufs.index(stage), key, rows, inside, DIM, REST, L)
    return _hand_over(full, pending, stage)


@gluon.jit
def _values(v_bufs, full, v_free, pending, i, value, rows, DIM_V: gl.constexpr, L: gl.constexpr):
    """Start to copy the values of tile ``i``."""
    stage = i % STAGES
    mbarrier.wait(v_free.index(stage), ((i // STAGES) & 1) ^ 1)
    copy_rows(v_bufs.index(stage), value, rows, rows >= 0, 0, DIM_V, L)
    return _hand_over(full, pending, STAGES + stage)


@gluon.jit
def _wait_unused(k_free, tile, i):
    """Wait until a tile of keys is given back. Tiles whose buffer another one has taken, before ``i``, have been."""
    tile = gl.maximum(tile, -1)
    there = (tile >= 0) & (tile + STAGES >= i)
    tile = gl.maximum(tile, 0)
    mbarrier.wait(k_free.index(tile % STAGES), (tile // STAGES) & 1, pred=there)


@gluon.jit
def _queries(
    piece_bufs,
    q_bufs,
    q_rest_bufs,
    full,
    pending,
    slot,
    query,
    begin,
    new,
    length,
    first,
    head,
    QUERY_TOKEN,
    QUERY_HEAD,
    DIM: gl.constexpr,
    REST: gl.constexpr,
    L: gl.constexpr,
):
    """Tell what a piece is, and start to copy its queries."""
    tell(piece_bufs.index(slot), begin, new, length, first, head)
    token = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    rows = (begin + token).to(gl.int64) * QUERY_TOKEN + head.to(gl.int64) * QUERY_HEAD
    copy_rows(q_bufs.index(slot), query, rows, token < new, 0, DIM, L)
    if REST > 0:
        copy_rows(q_rest_bufs.index(slot), query, rows, token < new, DIM, REST, L)
    return _hand_over(full, pending, 2 * STAGES + slot)


@gluon.jit
def produce(
    query,
    key_cache,
    value_cache,
    block_table,
    query_starts,
    key_lengths,
    buffers,
    barriers,
    requests,
    heads,
    least_new,
    QUERY_TOKEN,
    QUERY_HEAD,
    KEY_BLOCK,
    KEY_SLOT,
    KEY_HEAD,
    VALUE_BLOCK,
    VALUE_SLOT,
    VALUE_HEAD,
    TABLE_ROW,
    GROUP: gl.constexpr,
    PAGED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    DIM: gl.constexpr,
    REST: gl.constexpr,
    DIM_V: gl.constexpr,
    QUERIES: gl.constexpr,
    NARROW: gl.constexpr,
):
    """Fill the buffers: a piece's tiles of keys, the last one first, each with the values of the one before.

    That is the order in which they are multiplied, and pieces follow each other as tiles do: the first keys of a piece
    go before the last values of the piece before. Its queries go before its keys if they have a second buffer, else as
    soon as the queries before are done with. Rows beyond a request's keys are 0.
    """
    ROW: gl.constexpr = gl.int32 if NARROW else gl.int64
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # 8 rows of 128 bytes a warp, 16 a thread
    piece_bufs, q_bufs, q_rest_bufs, k_bufs, k_rest_bufs, v_bufs = buffers
    full, k_free, v_free = barriers
    turn = gl.to_tensor(0)
    chunk = gl.to_tensor(0)
    level = gl.to_tensor(FAR)
    base = gl.to_tensor(0)
    chunk, level, base, request, tile_m, head = find_piece(
        query_starts, key_lengths, requests, heads, least_new, turn, chunk, level, base, PAGED, CAUSAL
    )
    begin, new, length, key_begin = request_span(query_starts, key_lengths, request, request < requests, PAGED)
    tiles, _whole = key_tiles(new, length, tile_m * BLOCK_M, CAUSAL)
    pages = _pages(block_table, request, (tiles - 1) * BLOCK_N, length, TABLE_ROW, PAGED, BLOCK_SIZE, L)
    value_rows = gl.full([BLOCK_N], NONE, ROW, gl.SliceLayout(1, L))  # of the tile before
    pending = -1
    i = 0  # tiles so far
    done = 0  # pieces so far
    former = 0  # tiles before the piece before this one
    while request < requests:
        first = tile_m * BLOCK_M
        slot = done % QUERIES
        kv_head = (head // GROUP).to(gl.int64)
        key = key_cache + kv_head * KEY_HEAD
        value_offset = kv_head * VALUE_HEAD
        if not PAGED:
            key += key_begin.to(gl.int64) * KEY_SLOT
            value_offset += key_begin.to(gl.int64) * VALUE_SLOT
        # The numbers of a tile's pages are asked for one tile ahead, those of a piece's first tile one piece ahead.
        start = (tiles - 1) * BLOCK_N
        ahead = _pages(block_table, request, start - BLOCK_N, length, TABLE_ROW, PAGED, BLOCK_SIZE, L)
        if QUERIES > 1:
            _wait_unused(k_free, former - 1, i)
            pending = _queries(
                piece_bufs, q_bufs, q_rest_bufs, full, pending, slot, query, begin, new, length, first, head,
                QUERY_TOKEN, QUERY_HEAD, DIM, REST, L,
            )  # fmt: skip
        key_rows, own_rows = _rows(
            pages, start, length, value_offset, KEY_BLOCK, KEY_SLOT, VALUE_BLOCK, VALUE_SLOT, PAGED, BLOCK_SIZE, ROW, L
        )
        pending = _keys(k_bufs, k_rest_bufs, full, k_free, pending, i, key, key_rows, start, length, DIM, REST, L)
        if i > 0:
            pending = _values(v_bufs, full, v_free, pending, i - 1, value_cache, value_rows, DIM_V, L)
            if QUERIES == 1:
                pending = _hand_over_last(full, pending)
        value_rows = own_rows
        if QUERIES == 1:
            _wait_unused(k_free, i - 1, i)
            pending = _queries(
                piece_bufs, q_bufs, q_rest_bufs, full, pending, slot, query, begin, new, length, first, head,
                QUERY_TOKEN, QUERY_HEAD, DIM, REST, L,
            )  # fmt: skip
        former = i + 0  # Triton 3.6 takes two variables that begin a loop as one value for the same
        i += 1
        turn += 1
        chunk, level, base, next_request, next_tile_m, next_head = find_piece(
            query_starts, key_lengths, requests, heads, least_new, turn, chunk, level, base, PAGED, CAUSAL
        )
        next_begin, next_new, next_length, next_key_begin = request_span(
            query_starts, key_lengths, next_request, next_request < requests, PAGED
        )
        next_tiles, _whole = key_tiles(next_new, next_length, next_tile_m * BLOCK_M, CAUSAL)
        pages = _pages(
            block_table, next_request, (next_tiles - 1) * BLOCK_N, next_length, TABLE_ROW, PAGED, BLOCK_SIZE, L
        )
        for _tile in range(1, tiles):
            start -= BLOCK_N
            later = _pages(block_table, request, start - BLOCK_N, length, TABLE_ROW, PAGED, BLOCK_SIZE, L)
            key_rows, own_rows = _rows(
                ahead, start, length, value_offset, KEY_BLOCK, KEY_SLOT, VALUE_BLOCK, VALUE_SLOT, PAGED, BLOCK_SIZE,
                ROW, L,
            )  # fmt: skip
            pending = _keys(k_bufs, k_rest_bufs, full, k_free, pending, i, key, key_rows, start, length, DIM, REST, L)
            pending = _values(v_bufs, full, v_free, pending, i - 1, value_cache, value_rows, DIM_V, L)
            value_rows = own_rows
            ahead = later
            i += 1
        request = next_request
        tile_m = next_tile_m
        head = next_head
        begin = next_begin
        new = next_new
        length = next_length
        key_begin = next_key_begin
        tiles = next_tiles
        done += 1
    if i > 0:
        pending = _values(v_bufs, full, v_free, pending, i - 1, value_cache, value_rows, DIM_V, L)
        pending = _hand_over_last(full, pending)
    _wait_unused(k_free, (i if QUERIES == 1 else former) - 1, i)
    tell(piece_bufs.index(done % QUERIES), 0, 0, 0, 0, -1)
    mbarrier.arrive(full.index(2 * STAGES + done % QUERIES))
