"""Which rows and keys a program of the kernel for latent attention takes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .schedule import request_span

ROWS = gl.constexpr(64)
"""Rows of a program: heads times new tokens of a request."""
KEYS = gl.constexpr(64)
"""Keys of a tile; parts of a request's keys are multiples of it."""
HALF = gl.constexpr(256)
"""Half of the rank. A latent row lies in two pieces: the first half, and the second with the rotary part."""
ROTARY = gl.constexpr(64)
"""Elements behind the rank."""
BUFFERS = gl.constexpr(2)
"""Tiles in shared memory, each filled by a group of warps of its own."""
LOADING_WARPS = gl.constexpr(2)
"""Of each of these groups."""


@gluon.jit
def piece_of_work(query_starts, lengths, splits, HEADS: gl.constexpr, CAUSAL: gl.constexpr, DIVIDED: gl.constexpr):
    """A program's work: first token, new tokens and keys of its request; its first key and the one behind its last.

    Also how many tiles these are, and how many of the first ones all of its rows see as a whole.
    """
    request = gl.program_id(1)
    begin, new, length, _key_begin = request_span(query_starts, lengths, request, request >= 0, True)
    first = gl.program_id(0) * ROWS
    start = length * 0
    stop = length
    if DIVIDED:
        share = gl.cdiv(gl.cdiv(length, splits), KEYS) * KEYS  # as the one that adds up the parts has it
        start = gl.program_id(2) * share
        stop = gl.minimum(start + share, length)
    whole = stop
    if CAUSAL:
        before = length - new + 1
        stop = gl.minimum(stop, before + gl.minimum((first + (ROWS - 1)) // HEADS, new - 1))
        whole = gl.minimum(stop, before + first // HEADS)
    tiles = gl.cdiv(gl.maximum(stop - start, 0), KEYS)
    tiles = gl.where(first < new * HEADS, tiles, 0)
    return begin, new, length, start, stop, tiles, gl.maximum(whole - start, 0) // KEYS


@gluon.jit
def rows_of(new, HEADS: gl.constexpr, L: gl.constexpr):
    """Token within the request and head of a program's rows, and whether they exist."""
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=L)
    token = row // HEADS
    return token, row % HEADS, token < new
