"""The prefill kernel, its shared memory, and its three groups of warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..aggregates import aggregate
from ..pipeline import CONSUMER_REGISTERS, CONSUMERS, PRODUCER_REGISTERS, Ring, barriers, buffers
from ..rows import Rows
from .config import BLOCK_M, BLOCK_N, PRODUCER_WARPS, STAGES, Config
from .consumer import consume
from .producer import Cache, PageTable, produce
from .scheduler import FIELDS, Scheduler


@aggregate
class Pipeline:
    """Shared memory between producer and consumers; it takes all that a multiprocessor has.

    Queries have no separate ``free`` barrier: they are free when the last keys of their work item are.
    """

    messages: gl.shared_memory_descriptor  # the work item of the queries in a stage
    queries: Ring
    keys: Ring
    values: Ring
    full: gl.shared_memory_descriptor  # barriers of keys, values and queries


@gluon.jit
def alloc(config, dtype: gl.constexpr, QUERY_ARRIVALS: gl.constexpr):
    """Allocate the pipeline. Queries are there after ``QUERY_ARRIVALS`` arrivals, keys and values after one."""
    q = buffers(dtype, config.query_stages, BLOCK_M, config.dim)
    k = buffers(dtype, STAGES, BLOCK_N, config.dim)
    v = buffers(dtype, STAGES, BLOCK_N, config.dim_v)
    q_rest = q
    k_rest = k
    if config.rest > 0:
        q_rest = buffers(dtype, config.query_stages, BLOCK_M, config.rest)
        k_rest = buffers(dtype, STAGES, BLOCK_N, config.rest)
    MESSAGE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    messages = gl.allocate_shared_memory(gl.int32, [config.query_stages, FIELDS], MESSAGE)
    full = barriers(2 * STAGES + config.query_stages)
    k_free = barriers(STAGES)
    v_free = barriers(STAGES)
    for index in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(index), count=1)
    for index in gl.static_range(config.query_stages):
        mbarrier.init(full.index(2 * STAGES + index), count=QUERY_ARRIVALS)
    for index in gl.static_range(STAGES):
        mbarrier.init(k_free.index(index), count=CONSUMERS)
        mbarrier.init(v_free.index(index), count=CONSUMERS)
    keys = Ring(k, k_rest, full, k_free, 0, STAGES)
    values = Ring(v, v, full, v_free, STAGES, STAGES)
    queries = Ring(q, q_rest, full, k_free, 2 * STAGES, config.query_stages)
    if QUERY_ARRIVALS > 1:
        # Waits for barriers of one array have a barrier of threads between them.
        v_full = barriers(STAGES)
        for index in gl.static_range(STAGES):
            mbarrier.init(v_full.index(index), count=1)
        values = Ring(v, v, v_full, v_free, 0, STAGES)
    return Pipeline(messages, queries, keys, values, full)


# Triton's launcher takes only numbers and tensors, so the aggregates are made here.
@gluon.jit(do_not_specialize=["requests", "heads", "least_new", "TABLE_ROW"])
def attention(
    query,
    key_cache,
    value_cache,
    block_table,
    query_starts,
    key_lengths,
    out,
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
    SCALE,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    DIM: gl.constexpr,
    REST: gl.constexpr,
    DIM_V: gl.constexpr,
    NARROW: gl.constexpr,
):
    """Grid: as many programs as the device has processors, each with all of a processor's memory.

    A head's elements are cut into ``DIM`` and ``REST``, powers of two. Requests with fewer than ``least_new`` new
    tokens are left out. ``key_lengths`` has each request's number of keys. With ``NARROW`` all places in the caches fit
    32 bits.
    """
    QUERY_STAGES: gl.constexpr = 1 if REST > 0 else 2  # heads of 192 leave no room for a second
    OFFSET: gl.constexpr = gl.int32 if NARROW else gl.int64
    config = Config(DIM, REST, DIM_V, GROUP, QUERY_STAGES, CAUSAL, False, OFFSET)
    pipeline = alloc(config, query.dtype.element_ty, 1)
    scheduler = Scheduler(query_starts, key_lengths, requests, heads, least_new, True, CAUSAL)
    # A stride of 1, which a tensor with one head may have, is a constant until it is made a tensor.
    queries = Rows(query, gl.to_tensor(QUERY_TOKEN), gl.to_tensor(QUERY_HEAD))
    results = Rows(out, gl.to_tensor(OUT_TOKEN), gl.to_tensor(OUT_HEAD))
    keys = Cache(key_cache, gl.to_tensor(KEY_BLOCK), gl.to_tensor(KEY_SLOT), gl.to_tensor(KEY_HEAD))
    values = Cache(value_cache, gl.to_tensor(VALUE_BLOCK), gl.to_tensor(VALUE_SLOT), gl.to_tensor(VALUE_HEAD))
    table = PageTable(block_table, TABLE_ROW, BLOCK_SIZE)
    gl.warp_specialize(
        [
            (consume, (config, pipeline, results, out, 0, SCALE, 0)),
            (consume, (config, pipeline, results, out, 0, SCALE, 1)),
            (produce, (config, pipeline, scheduler, queries, keys, values, table)),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
