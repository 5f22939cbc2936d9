"""Tiles, stages, and the items of work with their rows and keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..aggregates import aggregate
from ..products import ROWS
from ..requests import load_request, load_token

KEYS = gl.constexpr(64)
"""Keys of a tile; parts of a request's keys are multiples of it."""
HALF = gl.constexpr(256)
"""Half of the rank. Shared memory holds a latent row in two pieces: first half; second half and rotary part."""
ROTARY = gl.constexpr(64)
"""Elements after the rank."""
STAGES = gl.constexpr(2)
"""Tiles in shared memory, each filled by a separate producer and weighed by a separate consumer."""
PRODUCER_WARPS = gl.constexpr(2)


@aggregate
class Config:
    """Constants of a compiled kernel."""

    heads: gl.constexpr
    block_size: gl.constexpr  # slots of a block of the cache
    causal: gl.constexpr
    most_new: gl.constexpr  # most new tokens of a request: rows of the partial results
    divided: gl.constexpr  # whether programs share a request's keys
    listed: gl.constexpr  # whether each token counts as a request, with a list of keys
    persistent: gl.constexpr  # whether a program takes several items of work


@aggregate
class Items:
    """The items of work of all programs: tiles of ``ROWS`` rows, of each request, for each share of its keys.

    A persistent program takes every ``num_programs(0)``-th item; any other program takes one item. With ``listed`` keys
    a token counts as a request, and ``query_starts`` points to the number of covered tokens.
    """

    query_starts: gl.tensor
    lengths: gl.tensor
    tiles: gl.tensor
    requests: gl.tensor
    splits: gl.tensor

    @gluon.jit
    def number(self):
        """Return the number of items."""
        return self.tiles * self.requests * self.splits


@aggregate
class Work:
    """One item: rows of a request from ``ROWS * tile`` on, and its keys from ``start`` to before ``stop``.

    Fields: tile, request and share of the keys; the request's first token, new tokens and keys; the item's keys; the
    number of their tiles, and of the leading tiles that all rows see completely.
    """

    tile: gl.tensor
    request: gl.tensor
    split: gl.tensor
    begin: gl.tensor
    new: gl.tensor
    length: gl.tensor
    start: gl.tensor
    stop: gl.tensor
    tiles: gl.tensor
    whole: gl.tensor
    heads: gl.constexpr

    @gluon.jit
    def rows(self, L: gl.constexpr):
        """Token within the request and head of the rows, and whether they exist."""
        row = self.tile * ROWS + gl.arange(0, ROWS, layout=L)
        token = row // self.heads
        return token, row % self.heads, token < self.new


@gluon.jit
def find_work(config, items, item):
    """Return the work of an item."""
    tile = item % items.tiles
    index = item // items.tiles % items.requests
    split = item // (items.tiles * items.requests)
    if config.listed:
        request = load_token(items.query_starts, items.lengths, index)
    else:
        request = load_request(items.query_starts, items.lengths, index, index >= 0, True)
    new = request.new
    length = request.length
    first = tile * ROWS
    start = length * 0
    stop = length
    if config.divided:
        share = (
            gl.cdiv(gl.cdiv(length, items.splits), KEYS) * KEYS
        )  # the kernel that adds up the parts divides in the same way
        start = split * share
        stop = gl.minimum(start + share, length)
    whole = stop
    if config.causal:
        before = length - new + 1
        stop = gl.minimum(stop, before + gl.minimum((first + (ROWS - 1)) // config.heads, new - 1))
        whole = gl.minimum(stop, before + first // config.heads)
    tiles = gl.cdiv(gl.maximum(stop - start, 0), 2 * KEYS) * 2
    tiles = gl.where(first < new * config.heads, tiles, 0)
    seen = gl.maximum(whole - start, 0) // KEYS
    return Work(tile, index, split, request.begin, new, length, start, stop, tiles, seen, config.heads)
