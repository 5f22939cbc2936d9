"""Assignment of work items to programs in turns: the producer finds an item and sends it to the consumers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..aggregates import aggregate
from ..requests import Request, load_request
from .config import BLOCK_M, BLOCK_N

SPAN = gl.constexpr(256)
"""Requests that are searched at a time; items of later requests come in later spans."""
HIGHEST = gl.constexpr(1 << 29)
"""Bound above all levels; its negative is below all levels."""
FIELDS = gl.constexpr(8)
"""Number of fields of a message: a power of two."""


@aggregate
class QueryTile:
    """``BLOCK_M`` queries of a head of a request.

    Fields: the request's first token, new tokens and keys; the tile's first query among the new tokens; the head.
    """

    begin: gl.tensor
    new: gl.tensor
    length: gl.tensor
    first: gl.tensor
    head: gl.tensor

    @gluon.jit
    def nothing(self):
        """Return the message that ends a program: no head."""
        zero = self.head * 0
        return QueryTile(zero, zero, zero, zero, zero - 1)

    @gluon.jit
    def key_tiles(self, CAUSAL: gl.constexpr):
        """Return the number of key tiles that some query sees, at least 1, and of those that all queries see fully."""
        stop = self.length
        whole = self.length // BLOCK_N
        if CAUSAL:
            before = self.length - self.new + self.first
            stop = gl.minimum(self.length, before + BLOCK_M)
            whole = gl.maximum(0, gl.minimum(self.length, before + 1)) // BLOCK_N
        return gl.cdiv(gl.maximum(stop, 1), BLOCK_N), whole


@aggregate
class WorkItem:
    """A tile of queries of a request and a head, that request's tokens and keys, and the tile's number of key tiles."""

    index: gl.tensor  # index of the request
    tile: gl.tensor
    head: gl.tensor
    request: Request
    tiles: gl.tensor

    @gluon.jit
    def queries(self):
        """Return the item as consumers see it."""
        request = self.request
        return QueryTile(request.begin, request.new, request.length, self.tile * BLOCK_M, self.head)


@aggregate
class Cursor:
    """Position at which the search of a turn ended.

    Fields: number of the turn, first request of the span, level, and rows before the level.
    """

    turn: gl.tensor
    span: gl.tensor
    level: gl.tensor
    rows: gl.tensor


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _count(tiles, low, high, level):
    """Return (requests active at ``level``, next lower level at which that count changes)."""
    below = (tiles > 0) & (low < level)
    stop = gl.max(gl.where(below, gl.where(high < level, high, low), -HIGHEST), axis=0)
    return gl.sum((below & (high >= level)).to(gl.int32), axis=0), stop


@aggregate
class Scheduler:
    """Assigns work items to programs in turns, starting with the items that have the most keys.

    A row is a tile of queries of a request, with an item for each head. With a causal mask a row's level is the number
    of key tiles that it sees, or one more. Without a mask all rows of a request see the same keys; the last row has
    their level and earlier rows have the levels below it, so a request's rows differ in level in both cases. Rows are
    sorted by level, and every second turn goes through the programs in reverse, which nearly balances their work.
    """

    query_starts: gl.tensor
    key_lengths: gl.tensor
    requests: gl.tensor
    heads: gl.tensor
    least_new: gl.tensor
    paged: gl.constexpr
    causal: gl.constexpr

    @gluon.jit
    def start(self):
        """Return the cursor before the first turn."""
        return Cursor(gl.to_tensor(-1), gl.to_tensor(0), gl.to_tensor(HIGHEST), gl.to_tensor(0))

    @gluon.jit
    def _levels(self, span):
        """Return, for SPAN requests from ``span`` on: index, number of query tiles, level range (low, high]."""
        L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        index = span + gl.arange(0, SPAN, layout=L)
        mask = index < self.requests
        request = load_request(self.query_starts, self.key_lengths, index, mask, self.paged)
        tiles = gl.cdiv(request.new, BLOCK_M)
        if self.causal:
            # The shift divides by BLOCK_N, also a number that is negative.
            low = (request.length - request.new + (BLOCK_N - 1)) >> 7
        else:
            low = gl.cdiv(request.length, BLOCK_N) - tiles
        tiles = gl.where(mask & (request.new >= self.least_new), tiles, 0)
        return index, tiles, low, low + tiles

    @gluon.jit
    def find(self, cursor):
        """Return (cursor, request, query tile, head) of the program's item; after the last, request is ``requests``."""
        programs = gl.num_programs(0)
        place = gl.program_id(0)
        turn = cursor.turn + 1
        if turn % 2 == 1:
            place = programs - 1 - place
        item = turn * programs + place
        row = item // self.heads
        span = cursor.span
        level = cursor.level
        rows = cursor.rows
        index, tiles, low, high = self._levels(span)
        active, stop = _count(tiles, low, high, level)
        while (span < self.requests) & (row >= rows + active * (level - stop)):
            rows += active * (level - stop)
            level = stop
            if level == -HIGHEST:
                span += SPAN
                level = gl.to_tensor(HIGHEST)
            index, tiles, low, high = self._levels(span)
            active, stop = _count(tiles, low, high, level)
        active = gl.maximum(active, 1)
        own_level = level - (row - rows) // active
        here = (tiles > 0) & (low < level) & (high >= level)
        chosen = here & (gl.associative_scan(here.to(gl.int32), 0, _add) == (row - rows) % active + 1)
        request = gl.sum(gl.where(chosen, index, 0), axis=0)
        tile = own_level - 1 - gl.sum(gl.where(chosen, low, 0), axis=0)
        request = gl.where(span < self.requests, request, self.requests)
        return Cursor(turn, span, level, rows), request, tile, item % self.heads

    @gluon.jit
    def next(self, cursor):
        """Return (cursor, work item) of the program's next turn."""
        cursor, index, tile, head = self.find(cursor)
        request = load_request(self.query_starts, self.key_lengths, index, index < self.requests, self.paged)
        queries = QueryTile(request.begin, request.new, request.length, tile * BLOCK_M, head)
        tiles, _whole = queries.key_tiles(self.causal)
        return cursor, WorkItem(index, tile, head, request, tiles)


@gluon.jit
def send(message, queries):
    """Write a tile of queries into shared memory; a negative head tells that there is no more."""
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [gl.num_warps()], [0])
    index = gl.arange(0, FIELDS, layout=L)
    last = gl.where(index == 3, queries.first, queries.head)
    message.store(
        gl.where(
            index == 0,
            queries.begin,
            gl.where(index == 1, queries.new, gl.where(index == 2, queries.length, last)),
        )
    )


@gluon.jit
def _field(fields, index, WHICH: gl.constexpr):
    return gl.sum(gl.where(index == WHICH, fields, 0), axis=0)


@gluon.jit
def receive(message):
    """Return the tile of queries that :func:`send` has written."""
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [gl.num_warps()], [0])
    index = gl.arange(0, FIELDS, layout=L)
    fields = message.load(L)
    return QueryTile(
        _field(fields, index, 0),
        _field(fields, index, 1),
        _field(fields, index, 2),
        _field(fields, index, 3),
        _field(fields, index, 4),
    )
