"""Tiles, stages and compile-time constants of the prefill kernels."""

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

    dim: gl.constexpr  # the largest power of two in the head size of queries and keys
    rest: gl.constexpr  # the rest of that head size: 0 or a power of two
    dim_v: gl.constexpr  # head size of values
    group: gl.constexpr  # query heads that share a head of keys
    query_stages: gl.constexpr  # query buffers
    causal: gl.constexpr
    lse: gl.constexpr  # whether the rows' log-sum-exp is written
    offset_type: gl.constexpr  # type of offsets into the caches
