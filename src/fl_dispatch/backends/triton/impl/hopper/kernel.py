"""The Hopper kernel: one group of warps loads, two multiply, and each runs as far ahead as the buffers let it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .consumer import consume
from .producer import produce
from .schedule import BLOCK_M, BLOCK_N, FIELDS, STAGES

REGISTERS = gl.constexpr(216)
"""Of a thread that multiplies: what a thread that loads leaves of a processor's, which are 504 for three
threads. Two half groups that load, as in the kernel for latent attention, count as one."""
REGISTERS_LOADING = gl.constexpr(72)
"""Of a thread that loads."""


@gluon.jit(do_not_specialize=["requests", "heads", "least_new", "LSE_HEAD", "TABLE_ROW"])
def attention(
    query,
    key_cache,
    value_cache,
    block_table,
    query_starts,
    key_lengths,
    out,
    lse,
    requests,
    heads,
    least_new,
    LSE_HEAD,
    QUERY_TOKEN,
    QUERY_HEAD,
    KEY_BLOCK,
    KEY_SLOT,
    KEY_HEAD,
    VALUE_BLOCK,
    VALUE_SLOT,
    VALUE_HEAD,
    OUT_TOKEN,
    OUT_HEAD,
    TABLE_ROW,
    SCALE,
    GROUP: gl.constexpr,
    PAGED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
    DIM: gl.constexpr,
    REST: gl.constexpr,
    DIM_V: gl.constexpr,
    NARROW: gl.constexpr,
):
    """Grid: as many programs as the device has processors, each with all of a processor's memory.

    A head's elements are cut into ``DIM`` and ``REST``, powers of two. Requests with fewer than ``least_new`` new
    tokens are left out. ``key_lengths`` has each request's number of keys, or, unless ``PAGED``, where its keys start.
    """
    QUERIES: gl.constexpr = 1 if REST > 0 else 2  # tiles of queries, of which a second of heads of 192 has no room
    dtype: gl.constexpr = query.dtype.element_ty
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_bufs = gl.allocate_shared_memory(dtype, [QUERIES, BLOCK_M, DIM], rows)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], rows)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM_V], rows)
    q_rest_bufs = q_bufs
    k_rest_bufs = k_bufs
    if REST > 0:
        q_rest_bufs = gl.allocate_shared_memory(dtype, [QUERIES, BLOCK_M, REST], rows)
        k_rest_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, REST], rows)
    piece_bufs = gl.allocate_shared_memory(gl.int32, [QUERIES, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    one: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES + QUERIES, 1], one)  # of keys, of values, of queries
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    for index in gl.static_range(2 * STAGES + QUERIES):
        mbarrier.init(full.index(index), count=1)
    for index in gl.static_range(STAGES):
        mbarrier.init(k_free.index(index), count=2)
        mbarrier.init(v_free.index(index), count=2)
    buffers = (piece_bufs, q_bufs, q_rest_bufs, k_bufs, k_rest_bufs, v_bufs)
    barriers = (full, k_free, v_free)
    gl.warp_specialize(
        [
            (consume, (
                out, lse, buffers, barriers, OUT_TOKEN, OUT_HEAD, LSE_HEAD, SCALE, 0, CAUSAL, LSE, REST, DIM_V, QUERIES,
            )),
            (consume, (
                out, lse, buffers, barriers, OUT_TOKEN, OUT_HEAD, LSE_HEAD, SCALE, 1, CAUSAL, LSE, REST, DIM_V, QUERIES,
            )),
            (produce, (
                query, key_cache, value_cache, block_table, query_starts, key_lengths, buffers, barriers, requests,
                heads, least_new, QUERY_TOKEN, QUERY_HEAD, KEY_BLOCK, KEY_SLOT, KEY_HEAD, VALUE_BLOCK, VALUE_SLOT,
                VALUE_HEAD, TABLE_ROW, GROUP, PAGED, BLOCK_SIZE, CAUSAL, DIM, REST, DIM_V, QUERIES, NARROW,
            )),
        ],
        [4, 4],
        [REGISTERS, REGISTERS_LOADING],
    )  # fmt: skip
