"""Which work a program of the Hopper kernel takes: the part that loads finds it, and tells the others."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK_M = gl.constexpr(128)
"""Queries of a head that a program takes at a time, 64 for each group of warps that multiplies."""
BLOCK_N = gl.constexpr(128)
"""Keys of a tile."""
STAGES = gl.constexpr(2)
"""Tiles of keys, and of values, that shared memory holds beside the queries; of heads of 128, a third tile of each fits
only with one tile of queries, and was slower."""
SPAN = gl.constexpr(256)
"""Requests that are looked at together; those after them come after them."""
FAR = gl.constexpr(1 << 29)
"""Above all levels; its negative is below them."""
FIELDS = gl.constexpr(8)
"""Numbers that describe a piece of work: a power of two."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def request_span(query_starts, key_lengths, request, there, PAGED: gl.constexpr):
    """First token, new tokens, keys and first key (0 if they are paged) of a request, or of several."""
    begin = gl.load(query_starts + request, mask=there, other=0).to(gl.int32)
    new = gl.load(query_starts + request + 1, mask=there, other=0).to(gl.int32) - begin
    key_begin = begin * 0
    length = gl.load(key_lengths + request, mask=there, other=0).to(gl.int32)
    if not PAGED:
        key_begin = length
        length = gl.load(key_lengths + request + 1, mask=there, other=0).to(gl.int32) - key_begin
    return begin, new, length, key_begin


@gluon.jit
def _levels(new, length, CAUSAL: gl.constexpr):
    """A request's tiles of queries, and a number below their levels, which follow it one by one.

    With a causal mask, a level is how many tiles of keys are seen, or one more. Without one all see the same, and the
    last tile of queries has that level; the others' differ only in order to be told apart.
    """
    tiles = gl.cdiv(new, BLOCK_M)
    if CAUSAL:
        low = (length - new + (BLOCK_N - 1)) >> 7  # of a number that may be negative: divided by 128
    else:
        low = gl.cdiv(length, BLOCK_N) - tiles
    return tiles, low


@gluon.jit
def _span(query_starts, key_lengths, requests, least_new, chunk, PAGED: gl.constexpr, CAUSAL: gl.constexpr):
    """Of the requests from ``chunk`` on: number, tiles of queries, and below and up to which level these are."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    request = chunk + gl.arange(0, SPAN, layout=L)
    there = request < requests
    _begin, new, length, _key_begin = request_span(query_starts, key_lengths, request, there, PAGED)
    tiles, low = _levels(new, length, CAUSAL)
    tiles = gl.where(there & (new >= least_new), tiles, 0)
    return request, tiles, low, low + tiles


@gluon.jit
def _run(tiles, low, high, level):
    """How many requests have a piece on a level, and the next level below which that may be another number."""
    below = (tiles > 0) & (low < level)
    stop = gl.max(gl.where(below, gl.where(high < level, high, low), -FAR), axis=0)
    return gl.sum((below & (high >= level)).to(gl.int32), axis=0), stop


@gluon.jit
def find_piece(
    query_starts,
    key_lengths,
    requests,
    heads,
    least_new,
    turn,
    chunk,
    level,
    base,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """The program's piece of work in a turn: request (``requests`` if there is none), tile of queries, head.

    A row is a tile of queries of a request, with a piece for each head. Rows are sorted by their level, so those that
    see the most keys come first; programs take the pieces in turns, every other turn backwards, which makes their sums
    nearly the same. ``chunk``, ``level`` and ``base`` are where the search of the turn before ended, and are returned
    anew: the requests that are looked at, the level, and how many rows come before it. It begins at 0, ``FAR``, 0.
    """
    programs = gl.num_programs(0)
    seat = gl.program_id(0)
    if turn % 2 == 1:
        seat = programs - 1 - seat
    work = turn * programs + seat
    row = work // heads
    request, tiles, low, high = _span(query_starts, key_lengths, requests, least_new, chunk, PAGED, CAUSAL)
    active, stop = _run(tiles, low, high, level)
    while (chunk < requests) & (row >= base + active * (level - stop)):
        base += active * (level - stop)
        level = stop
        if level == -FAR:
            chunk += SPAN
            level = gl.to_tensor(FAR)
        request, tiles, low, high = _span(query_starts, key_lengths, requests, least_new, chunk, PAGED, CAUSAL)
        active, stop = _run(tiles, low, high, level)
    active = gl.maximum(active, 1)
    mine = level - (row - base) // active
    here = (tiles > 0) & (low < level) & (high >= level)
    chosen = here & (gl.associative_scan(here.to(gl.int32), 0, _add) == (row - base) % active + 1)
    found = gl.sum(gl.where(chosen, request, 0), axis=0)
    tile = mine - 1 - gl.sum(gl.where(chosen, low, 0), axis=0)
    return chunk, level, base, gl.where(chunk < requests, found, requests), tile, work % heads


@gluon.jit
def key_tiles(new, length, first, CAUSAL: gl.constexpr):
    """How many tiles of keys the queries from ``first`` on see, at least 1, and how many all of them see as a whole."""
    stop = length
    whole = length // BLOCK_N
    if CAUSAL:
        before = length - new + first
        stop = gl.minimum(length, before + BLOCK_M)
        whole = gl.maximum(0, gl.minimum(length, before + 1)) // BLOCK_N
    return gl.cdiv(gl.maximum(stop, 1), BLOCK_N), whole


@gluon.jit
def tell(buffer, begin, new, length, first, head):
    """Write a piece of work into shared memory; a negative head tells that there is no more."""
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    index = gl.arange(0, FIELDS, layout=L)
    last = gl.where(index == 3, first, head)
    buffer.store(gl.where(index == 0, begin, gl.where(index == 1, new, gl.where(index == 2, length, last))))


@gluon.jit
def _field(fields, index, WHICH: gl.constexpr):
    return gl.sum(gl.where(index == WHICH, fields, 0), axis=0)


@gluon.jit
def told(buffer):
    """What :func:`tell` has written."""
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    index = gl.arange(0, FIELDS, layout=L)
    fields = buffer.load(L)
    return (
        _field(fields, index, 0),
        _field(fields, index, 1),
        _field(fields, index, 2),
        _field(fields, index, 3),
        _field(fields, index, 4),
    )
