"""The decode kernel for latent attention, its shared memory, and its four groups of warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..aggregates import aggregate
from ..pipeline import CONSUMER_REGISTERS, CONSUMERS, PRODUCER_REGISTERS, Ring, barriers, buffers
from ..products import ROWS
from ..rows import Rows
from .consumer import Partial, consume
from .producer import LatentCache, produce
from .work import HALF, KEYS, PRODUCER_WARPS, ROTARY, STAGES, Config, Items


@aggregate
class Pipeline:
    """Shared memory between producers and consumers; it takes all that a multiprocessor has.

    Queries stay in memory for an item of work, and are published with its first tile of keys.
    """

    q_left: gl.shared_memory_descriptor
    q_right: gl.shared_memory_descriptor
    q_rotary: gl.shared_memory_descriptor
    left: Ring  # first halves of latent rows
    right: Ring  # second halves, and the rotary parts, which a tile's weights overwrite
    rows: gl.shared_memory_descriptor  # a number for each row, from each consumer: its maximum, at the end its sum
    weighed: gl.shared_memory_descriptor  # barriers: a tile's weights and its rows' maxima are written
    q_free: gl.shared_memory_descriptor  # barrier: both consumers have computed the last scores of the queries


@gluon.jit
def alloc(dtype: gl.constexpr):
    """Allocate the pipeline."""
    q_left = buffers(dtype, 1, ROWS, HALF)
    q_right = buffers(dtype, 1, ROWS, HALF)
    q_rotary = buffers(dtype, 1, ROWS, ROTARY)
    left = buffers(dtype, STAGES, KEYS, HALF)
    right = buffers(dtype, STAGES, KEYS, HALF)
    rotary = buffers(dtype, STAGES, KEYS, ROTARY)
    left_ring = Ring(left, left, barriers(STAGES), barriers(STAGES), 0, STAGES)
    right_ring = Ring(right, rotary, barriers(STAGES), barriers(STAGES), 0, STAGES)
    rows = gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    weighed = barriers(STAGES)
    for index in gl.static_range(STAGES):
        mbarrier.init(left_ring.full.index(index), count=1)
        mbarrier.init(right_ring.full.index(index), count=1)
        mbarrier.init(left_ring.free.index(index), count=1)
        mbarrier.init(right_ring.free.index(index), count=1 + index)
        mbarrier.init(weighed.index(index), count=1)
    q_free = barriers(1).index(0)
    mbarrier.init(q_free, count=CONSUMERS)
    return Pipeline(q_left, q_right, q_rotary, left_ring, right_ring, rows, weighed, q_free)


# Triton's launcher takes only numbers and tensors, so the aggregates are made here.
@gluon.jit(do_not_specialize=["tiles", "requests", "splits", "TABLE_ROW"])
def latent_attention(
    query,
    query_rope,
    cache,
    block_table,
    query_starts,
    lengths,
    out,
    partial,
    statistics,
    tiles,
    requests,
    splits,
    QUERY_TOKEN,
    QUERY_HEAD,
    ROPE_TOKEN,
    ROPE_HEAD,
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
    """Grid: the items of work. Row ``token * HEADS + head`` of a request.

    Each program has all of a processor's memory.
    """
    config = Config(HEADS, BLOCK_SIZE, CAUSAL, MOST_NEW, DIVIDED, False, False)
    pipeline = alloc(query.dtype.element_ty)
    # A stride of 1, which a tensor with one head may have, is a constant until it is made a tensor.
    queries = Rows(query, gl.to_tensor(QUERY_TOKEN), gl.to_tensor(QUERY_HEAD))
    rotary = Rows(query_rope, gl.to_tensor(ROPE_TOKEN), gl.to_tensor(ROPE_HEAD))
    results = Rows(out, gl.to_tensor(OUT_TOKEN), gl.to_tensor(OUT_HEAD))
    latents = LatentCache(cache, gl.to_tensor(CACHE_BLOCK), gl.to_tensor(CACHE_SLOT), block_table, TABLE_ROW)
    parts = Partial(partial, statistics, splits)
    items = Items(query_starts, lengths, tiles, requests, splits)
    gl.warp_specialize(
        [
            (consume, (config, pipeline, items, results, parts, SCALE, 0)),
            (consume, (config, pipeline, items, results, parts, SCALE, 1)),
            (produce, (config, pipeline, items, queries, rotary, latents, 0)),
            (produce, (config, pipeline, items, queries, rotary, latents, 1)),
        ],
        [4, PRODUCER_WARPS, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
