"""Which work a program of the Hopper kernel takes: all of its parts walk the same list, so nothing needs to be told."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK_M = gl.constexpr(128)
"""Queries of a head that a program takes at a time, 64 for each group of warps that multiplies."""
BLOCK_N = gl.constexpr(128)
"""Keys of a tile."""


@gluon.jit
def request_span(query_starts, key_lengths, request, least_new, PAGED: gl.constexpr):
    """A request's first token, new tokens, keys, first key (0 if they are paged), and tiles of queries."""
    begin = gl.load(query_starts + request).to(gl.int32)
    new = gl.load(query_starts + request + 1).to(gl.int32) - begin
    key_begin = 0
    if PAGED:
        length = gl.load(key_lengths + request).to(gl.int32)
    else:
        key_begin = gl.load(key_lengths + request).to(gl.int32)
        length = gl.load(key_lengths + request + 1).to(gl.int32) - key_begin
    tiles = gl.cdiv(new, BLOCK_M)
    if new < least_new:
        tiles = 0
    return begin, new, length, key_begin, tiles


@gluon.jit
def piece(turn, count, tiles, heads):
    """The program's piece of work in a turn: its number among a request's pieces, first query, head.

    A request's pieces are its tiles of queries, the last ones first, for they see the most keys, and in each all heads.
    Programs take them in turns, every other turn backwards, which evens the sums out. ``count`` pieces belong to the
    requests before; a number outside the request's own means that another request has the turn.
    """
    programs = gl.num_programs(0)
    seat = gl.program_id(0)
    if turn % 2 == 1:
        seat = programs - 1 - seat
    work = turn * programs + seat - count
    return work, (tiles - 1 - work // heads) * BLOCK_M, work % heads


@gluon.jit
def key_tiles(new, length, first, CAUSAL: gl.constexpr):
    """How many tiles of keys the queries from ``first`` on see, and how many of these all of them see as a whole."""
    stop = length
    whole = length // BLOCK_N
    if CAUSAL:
        before = length - new + first
        stop = gl.maximum(0, gl.minimum(length, before + BLOCK_M))
        whole = gl.maximum(0, gl.minimum(length, before + 1)) // BLOCK_N
    return gl.cdiv(stop, BLOCK_N), whole
