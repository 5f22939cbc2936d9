"""Tiles, stages, and the rows and keys of a program."""

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


@aggregate
class Work:
    """Rows of a request from ``ROWS * program_id(0)`` on, and its keys from ``start`` to before ``stop``.

    Fields: the request's first token, new tokens and keys; the program's keys; the number of their tiles, and of the
    leading tiles that all rows see completely.
    """

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
        row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=L)
        token = row // self.heads
        return token, row % self.heads, token < self.new


@gluon.jit
def find_work(config, query_starts, lengths, splits):
    """The program's work. With ``listed`` keys ``query_starts`` is where the number of covered tokens stands."""
    index = gl.program_id(1)
    if config.listed:
        request = load_token(query_starts, lengths, index)
    else:
        request = load_request(query_starts, lengths, index, index >= 0, True)
    new = request.new
    length = request.length
    first = gl.program_id(0) * ROWS
    start = length * 0
    stop = length
    if config.divided:
        share = (
            gl.cdiv(gl.cdiv(length, splits), KEYS) * KEYS
        )  # the kernel that adds up the parts divides in the same way
        start = gl.program_id(2) * share
        stop = gl.minimum(start + share, length)
    whole = stop
    if config.causal:
        before = length - new + 1
        stop = gl.minimum(stop, before + gl.minimum((first + (ROWS - 1)) // config.heads, new - 1))
        whole = gl.minimum(stop, before + first // config.heads)
    tiles = gl.cdiv(gl.maximum(stop - start, 0), 2 * KEYS) * 2
    tiles = gl.where(first < new * config.heads, tiles, 0)
    return Work(request.begin, new, length, start, stop, tiles, gl.maximum(whole - start, 0) // KEYS, config.heads)
