"""The Hopper kernel: one group of warps loads, two multiply, and each runs as far ahead as the buffers let it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .consumer import consume
from .producer import produce
from .schedule import BLOCK_M, BLOCK_N


@gluon.jit(do_not_specialize=["requests", "heads", "least_new"])
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
    LSE_HEAD,
    SCALE,
    GROUP: gl.constexpr,
    PAGED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
    DIM: gl.constexpr,
    REST: gl.constexpr,
    DIM_V: gl.constexpr,
    STAGES: gl.constexpr,
    NARROW: gl.constexpr,
    ORDERED: gl.constexpr,
    LATE: gl.constexpr,
    REGISTERS: gl.constexpr,
    REGISTERS_PRODUCER: gl.constexpr,
):
    """Grid: as many programs as the device has processors, each with all of a processor's memory.

    A head's elements are cut into ``DIM`` and ``REST``, powers of two. Requests with fewer than ``least_new`` new
    tokens are left out. ``key_lengths`` has each request's number of keys, or, unless ``PAGED``, where its keys start.
    """
    dtype: gl.constexpr = query.dtype.element_ty
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_buf = gl.allocate_shared_memory(dtype, [BLOCK_M, DIM], rows)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], rows)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM_V], rows)
    q_rest_buf = q_buf
    k_rest_bufs = k_bufs
    if REST > 0:
        q_rest_buf = gl.allocate_shared_memory(dtype, [BLOCK_M, REST], rows)
        k_rest_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, REST], rows)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], one)  # of keys, of values, of queries
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    q_free = gl.allocate_shared_memory(gl.int64, [1], one)
    turn_a = gl.allocate_shared_memory(gl.int64, [1], one)
    turn_b = gl.allocate_shared_memory(gl.int64, [1], one)
    for index in gl.static_range(2 * STAGES + 1):
        mbarrier.init(full.index(index), count=1 if LATE else 128)
    for index in gl.static_range(STAGES):
        mbarrier.init(k_free.index(index), count=2)
        mbarrier.init(v_free.index(index), count=2)
    mbarrier.init(q_free, count=2)
    mbarrier.init(turn_a, count=1)
    mbarrier.init(turn_b, count=1)
    buffers = (q_buf, q_rest_buf, k_bufs, k_rest_bufs, v_bufs)
    barriers = (full, k_free, v_free, q_free, turn_a, turn_b)
    gl.warp_specialize(
        [
            (consume, (
                query_starts, key_lengths, out, lse, buffers, barriers, requests, heads, least_new, OUT_TOKEN, OUT_HEAD,
                LSE_HEAD, SCALE, 0, PAGED, CAUSAL, LSE, REST, DIM_V, STAGES, ORDERED, LATE,
            )),
            (consume, (
                query_starts, key_lengths, out, lse, buffers, barriers, requests, heads, least_new, OUT_TOKEN, OUT_HEAD,
                LSE_HEAD, SCALE, 1, PAGED, CAUSAL, LSE, REST, DIM_V, STAGES, ORDERED, LATE,
            )),
            (produce, (
                query, key_cache, value_cache, block_table, query_starts, key_lengths, buffers, barriers, requests,
                heads, least_new, QUERY_TOKEN, QUERY_HEAD, KEY_BLOCK, KEY_SLOT, KEY_HEAD, VALUE_BLOCK, VALUE_SLOT,
                VALUE_HEAD, TABLE_ROW, GROUP, PAGED, BLOCK_SIZE, CAUSAL, DIM, REST, DIM_V, STAGES, NARROW, LATE,
            )),
        ],
        [4, 4],
        [REGISTERS, REGISTERS_PRODUCER],
    )  # fmt: skip
