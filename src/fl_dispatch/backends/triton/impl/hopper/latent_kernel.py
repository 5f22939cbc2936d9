"""Decoding of latent attention: two groups of warps load, and two multiply, each all scores but half of the values.

The sums of 64 rows over 512 values fill the registers of two groups, and 64 latent rows, which are keys and values,
fill one of the two buffers that a processor has room for. So both groups compute the scores of a tile: that costs half
as much again as to compute them once, but the groups have nothing to tell each other, and one's softmax runs beside the
other's products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .kernel import REGISTERS, REGISTERS_LOADING
from .latent_consumer import attend
from .latent_producer import load
from .latent_schedule import BUFFERS, HALF, KEYS, LOADING_WARPS, ROTARY, ROWS


@gluon.jit(do_not_specialize=["splits", "TABLE_ROW"])
def latent_attention(
    query,
    cache,
    block_table,
    query_starts,
    lengths,
    out,
    partial,
    statistics,
    splits,
    QUERY_TOKEN,
    QUERY_HEAD,
    CACHE_BLOCK,
    CACHE_SLOT,
    OUT_TOKEN,
    OUT_HEAD,
    TABLE_ROW,
    SCALE,
    HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    MOST_NEW: gl.constexpr,
    DIVIDED: gl.constexpr,
):
    """Grid: tiles of ``ROWS`` rows, requests, splits. Row ``token * HEADS + head`` of a request.

    Each program has all of a processor's memory.
    """
    dtype: gl.constexpr = query.dtype.element_ty
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_left = gl.allocate_shared_memory(dtype, [1, ROWS, HALF], rows)
    q_right = gl.allocate_shared_memory(dtype, [1, ROWS, HALF], rows)
    q_rotary = gl.allocate_shared_memory(dtype, [1, ROWS, ROTARY], rows)
    left_bufs = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, HALF], rows)
    right_bufs = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, HALF], rows)
    rotary_bufs = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, ROTARY], rows)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    left_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], one)
    right_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], one)
    left_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], one)
    right_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], one)
    scored = gl.allocate_shared_memory(gl.int64, [1, 1], one)  # by the first group, for the first time
    mbarrier.init(scored.index(0), count=1)
    for index in gl.static_range(BUFFERS):
        mbarrier.init(left_full.index(index), count=1)
        mbarrier.init(right_full.index(index), count=1)
        mbarrier.init(left_free.index(index), count=2)
        mbarrier.init(right_free.index(index), count=2)
    buffers = (q_left, q_right, q_rotary, left_bufs, right_bufs, rotary_bufs)
    barriers = (left_full, right_full, left_free, right_free, scored)
    gl.warp_specialize(
        [
            (attend, (
                query_starts, lengths, out, partial, statistics, buffers, barriers, splits, OUT_TOKEN, OUT_HEAD, SCALE,
                0, HEADS, CAUSAL, MOST_NEW, DIVIDED,
            )),
            (attend, (
                query_starts, lengths, out, partial, statistics, buffers, barriers, splits, OUT_TOKEN, OUT_HEAD, SCALE,
                1, HEADS, CAUSAL, MOST_NEW, DIVIDED,
            )),
            (load, (
                query, cache, block_table, query_starts, lengths, buffers, barriers, splits, QUERY_TOKEN, QUERY_HEAD,
                CACHE_BLOCK, CACHE_SLOT, TABLE_ROW, 0, HEADS, BLOCK_SIZE, CAUSAL, DIVIDED,
            )),
            (load, (
                query, cache, block_table, query_starts, lengths, buffers, barriers, splits, QUERY_TOKEN, QUERY_HEAD,
                CACHE_BLOCK, CACHE_SLOT, TABLE_ROW, 1, HEADS, BLOCK_SIZE, CAUSAL, DIVIDED,
            )),
        ],
        [4, LOADING_WARPS, LOADING_WARPS],
        [REGISTERS, REGISTERS_LOADING, REGISTERS_LOADING],
    )  # fmt: skip
