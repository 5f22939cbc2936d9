"""The prefill kernel with copies by the tensor memory accelerator: contiguous keys, one copying thread, no masks.

A tensor's descriptor has two more dimensions than rows and columns, so the accelerator itself stops at a request's last
row and writes zeros after it, whatever memory holds there. A row's address is ``base + ENDLESS * first + second *
stride + third * stride``. The first two dimensions compensate for ``third``, which must stay below ``ENDLESS``: see
:func:`place`. ``triton.tools.ragged_tma`` uses the same method.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..aggregates import aggregate
from ..rows import Rows
from .config import BLOCK_M, BLOCK_N, Config
from .consumer import consume
from .kernel import alloc
from .producer import wait_released
from .scheduler import Scheduler, send

# Triton 3.6 names this function differently.
bulk_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
# Triton 3.9 names this method differently.
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

ENDLESS = gl.constexpr(1 << 30)
"""Bound of the dimension that ends at a request's last row."""
CHUNK = gl.constexpr(64)
"""Columns of a copy: 128 bytes, the width of the swizzle."""
PRODUCER_WARPS = gl.constexpr(1)
CONSUMER_REGISTERS = gl.constexpr(224)
"""Registers of a thread. With 240 a producer that gets the rest spills."""
PRODUCER_REGISTERS = gl.constexpr(56)


@aggregate
class Place:
    """The first row of a tile, as coordinates of a descriptor."""

    end: gl.tensor  # first row after the request
    row: gl.tensor  # ENDLESS minus the rows from here to the request's end
    column: gl.tensor


@gluon.jit
def place(begin, size, row, column):
    """Row ``row`` of a request that has ``size`` rows from ``begin`` on."""
    return Place(begin + size, ENDLESS - size + row, column)


@gluon.constexpr_function
def chunk_layout():
    """Layout of tiles that are cut into chunks."""
    return gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def chunks(buffer, SIZE: gl.constexpr):
    """Return buffers as their chunks, one after the other; ``SIZE`` columns each."""
    NUMBER: gl.constexpr = buffer.shape[0] * (SIZE // CHUNK)
    return reinterpret(buffer, buffer.dtype, [NUMBER, buffer.shape[1], CHUNK], chunk_layout())


@gluon.jit
def _load_chunks(buffer, SIZE: gl.constexpr, stage, barrier, source, where, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Start to copy ``SIZE`` columns, from ``FIRST`` on, of a tile."""
    cut = chunks(buffer, SIZE)
    for part in gl.static_range(SIZE // CHUNK):
        target = cut.index(stage * (SIZE // CHUNK) + part).reshape([1, 1, ROWS, CHUNK])
        column = where.column + (FIRST + part * CHUNK)
        bulk_load(source, [ENDLESS, where.end, where.row, column], barrier, target)


@gluon.jit
def load_tile(ring, i, source, where, MAIN: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr):
    """Start to copy tile ``i`` into its free stage. The stage is full when its bytes are there."""
    stage = i % ring.stages
    barrier = ring.full.index(ring.offset + stage)
    mbarrier.expect(barrier, ROWS * (MAIN + REST) * 2)
    _load_chunks(ring.main, MAIN, stage, barrier, source, where, 0, ROWS)
    if REST > 0:
        _load_chunks(ring.rest, REST, stage, barrier, source, where, MAIN, ROWS)


@gluon.jit
def _send_item(config, pipeline, done, work, query, QUERY_HEAD):
    """Send a work item to the consumers, and start to copy its queries into their free stage."""
    ring = pipeline.queries
    queries = work.queries()
    stage = done % config.query_stages
    send(pipeline.messages.index(stage), queries)
    mbarrier.arrive(ring.full.index(ring.offset + stage))
    where = place(queries.begin, queries.new, queries.first, queries.head * QUERY_HEAD)
    load_tile(ring, done, query, where, config.dim, config.rest, BLOCK_M)


@gluon.jit
def _load_keys_and_values(config, pipeline, i, key, k_at, value, v_at):
    """Start to copy the keys of tile ``i``, and the values of the tile before, if there is one."""
    pipeline.keys.acquire(i)
    load_tile(pipeline.keys, i, key, k_at, config.dim, config.rest, BLOCK_N)
    if i > 0:
        pipeline.values.acquire(i - 1)
        load_tile(pipeline.values, i - 1, value, v_at, config.dim_v, 0, BLOCK_N)


@gluon.jit
def produce_bulk(config, pipeline, scheduler, query, key, value, QUERY_HEAD, KEY_HEAD, VALUE_HEAD):
    """Fill the rings, in the order of :func:`.producer.produce`.

    The next item is found while the copies into both stages of keys run.
    """
    cursor, work = scheduler.next(scheduler.start())
    i = 0  # tiles so far
    done = 0  # items so far
    former = 0  # tiles before the item before this one
    zero = work.index * 0
    v_at = Place(zero, zero, zero)  # values of the tile before
    while work.index < scheduler.requests:
        request = work.request
        tiles = work.tiles
        k_at = place(request.key_begin, request.length, (tiles - 1) * BLOCK_N, work.head * KEY_HEAD)
        if config.query_stages > 1:
            wait_released(pipeline.keys, former - 1, i)
            _send_item(config, pipeline, done, work, query, QUERY_HEAD)
        _load_keys_and_values(config, pipeline, i, key, k_at, value, v_at)
        if config.query_stages == 1:
            wait_released(pipeline.keys, i - 1, i)
            _send_item(config, pipeline, done, work, query, QUERY_HEAD)
        v_at = Place(k_at.end, k_at.row, work.head * VALUE_HEAD)
        former = i + 0
        i += 1
        if tiles > 1:
            k_at = Place(k_at.end, k_at.row - BLOCK_N, k_at.column)
            _load_keys_and_values(config, pipeline, i, key, k_at, value, v_at)
            v_at = Place(v_at.end, k_at.row, v_at.column)
            i += 1
        cursor, work = scheduler.next(cursor)
        for _tile in range(2, tiles):
            k_at = Place(k_at.end, k_at.row - BLOCK_N, k_at.column)
            _load_keys_and_values(config, pipeline, i, key, k_at, value, v_at)
            v_at = Place(v_at.end, k_at.row, v_at.column)
            i += 1
        done += 1
    if i > 0:
        pipeline.values.acquire(i - 1)
        load_tile(pipeline.values, i - 1, value, v_at, config.dim_v, 0, BLOCK_N)
    wait_released(pipeline.keys, (i if config.query_stages == 1 else former) - 1, i)
    stage = done % config.query_stages
    send(pipeline.messages.index(stage), work.queries().nothing())
    mbarrier.arrive(pipeline.full.index(pipeline.queries.offset + stage), count=2)


@gluon.jit(do_not_specialize=["requests", "heads", "LSE_HEAD"])
def attention_bulk(
    query_starts,
    key_starts,
    out,
    lse,
    query,
    key,
    value,
    requests,
    heads,
    LSE_HEAD,
    QUERY_HEAD,
    KEY_HEAD,
    VALUE_HEAD,
    OUT_TOKEN,
    OUT_HEAD,
    SCALE,
    CAUSAL: gl.constexpr,
    DIM: gl.constexpr,
    REST: gl.constexpr,
    DIM_V: gl.constexpr,
):
    """As :func:`.kernel.attention` for keys in a row; ``query``, ``key`` and ``value`` are descriptors.

    ``key_starts`` has the first row of each request's keys, and the end of the last request's.
    """
    QUERY_STAGES: gl.constexpr = 1 if REST > 0 else 2
    config = Config(DIM, REST, DIM_V, 1, QUERY_STAGES, CAUSAL, True, gl.int32)
    pipeline = alloc(config, out.dtype.element_ty, 2)
    fence_async_shared()  # makes the barriers visible to the accelerator
    scheduler = Scheduler(query_starts, key_starts, requests, heads, gl.to_tensor(0), False, CAUSAL)
    results = Rows(out, gl.to_tensor(OUT_TOKEN), gl.to_tensor(OUT_HEAD))
    q_head = gl.to_tensor(QUERY_HEAD)
    k_head = gl.to_tensor(KEY_HEAD)
    v_head = gl.to_tensor(VALUE_HEAD)
    gl.warp_specialize(
        [
            (consume, (config, pipeline, results, lse, LSE_HEAD, SCALE, 0)),
            (consume, (config, pipeline, results, lse, LSE_HEAD, SCALE, 1)),
            (produce_bulk, (config, pipeline, scheduler, query, key, value, q_head, k_head, v_head)),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
