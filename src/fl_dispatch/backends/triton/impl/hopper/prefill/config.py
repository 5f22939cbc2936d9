"""Tiles, stages, and what a prefill kernel is compiled for."""

from triton.experimental.gluon import language as gl

from ..aggregates import aggregate

BLOCK_M = gl.constexpr(128)
"""Queries of a work item, 64 for each consumer."""
BLOCK_N = gl.constexpr(128)
"""Keys of a tile."""
STAGES = gl.constexpr(2)
"""Pipeline depth. At head size 128 three stages fit only with one query buffer; measured slower."""
PRODUCER_WARPS = gl.constexpr(4)


@aggregate
class Config:
    """Constants of a compiled kernel."""

    dim: gl.constexpr  # of a head of queries and keys, the largest power of two
    rest: gl.constexpr  # what is left of it: 0 or a power of two
    dim_v: gl.constexpr  # of a head of values
    group: gl.constexpr  # heads of queries that share a head of keys
    query_stages: gl.constexpr  # query buffers
    causal: gl.constexpr
    lse: gl.constexpr  # whether the rows' log-sum-exp is written
    offset_type: gl.constexpr  # of places in the caches
