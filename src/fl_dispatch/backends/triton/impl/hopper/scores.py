"""Index scores of many queries: groups of warps hold keys in registers, and one warp copies queries.

A program has some tokens of a request and ``BLOCK_M`` of its queries. Each consumer has ``tiles`` tiles of 64 tokens,
which are the first operand of its products and stay in registers; the second is a query, all its heads, from a ring in
shared memory. So a product reads only 64 bytes of shared memory a cycle. Consumers wait for the producer only, not for
each other. With two tiles, the sums of one tile are made while the product of the other runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .aggregates import aggregate
from .pipeline import Ring, barriers, buffers, publish
from .products import ROWS, mma_layout
from .rows import Rows, async_load, copy_layout, copy_rows

KEY_SIZE = gl.constexpr(1)
"""Bytes of an element of keys and queries."""


@aggregate
class Config:
    """Constants of a compiled kernel."""

    heads: gl.constexpr
    dim: gl.constexpr
    block_size: gl.constexpr
    tiles: gl.constexpr  # tiles of 64 tokens that a consumer has: 1 or 2


@aggregate
class Work:
    """A program's queries ``first`` … ``first + count - 1`` of a request, and its tokens from ``start`` on.

    ``before`` is the number of cached tokens before the request's first query.
    """

    request: gl.tensor
    begin: gl.tensor
    first: gl.tensor
    count: gl.tensor
    start: gl.tensor
    length: gl.tensor
    before: gl.tensor


@aggregate
class IndexCache:
    """Keys ``[block, slot, dim]``, a scale for each, and the table of each request's blocks."""

    pointer: gl.tensor
    block_stride: gl.tensor
    slot_stride: gl.tensor
    scales: gl.tensor
    scale_block: gl.tensor
    scale_slot: gl.tensor
    table: gl.tensor
    table_stride: gl.tensor

    @gluon.jit
    def place(self, work, position, BLOCK_SIZE: gl.constexpr):
        """Block and slot of positions, and whether they exist."""
        seen = position < work.length
        table = self.table + work.request.to(gl.int64) * self.table_stride
        block = gl.load(table + position // BLOCK_SIZE, mask=seen, other=0).to(gl.int64)
        return block, (position % BLOCK_SIZE).to(gl.int64), seen


@aggregate
class Scores:
    """Scores ``[queries from first_row on, width]``."""

    pointer: gl.tensor
    first_row: gl.tensor
    width: gl.tensor


@aggregate
class Tokens:
    """Keys of a tile of tokens, in registers, their scales, and how many queries of the program miss each token."""

    keys: gl.tensor
    unit: gl.tensor
    ahead: gl.tensor


@gluon.constexpr_function
def scores_layout(heads):
    """Layout of the products of a tile."""
    return mma_layout(heads, 1)


@gluon.jit
def find_work(query_starts, lengths, first_row, rows, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return the work of a program; ``count`` is 0 if its queries see none of its tokens."""
    request = gl.program_id(2)
    begin = gl.load(query_starts + request).to(gl.int32)
    new = gl.load(query_starts + request + 1).to(gl.int32) - begin
    length = gl.load(lengths + request).to(gl.int32)
    before = length - new
    start = gl.program_id(0) * BLOCK_N
    first = gl.maximum(first_row - begin, 0) + gl.program_id(1) * BLOCK_M
    last = gl.minimum(gl.minimum(first + BLOCK_M, new), first_row + rows - begin)
    first = gl.maximum(first, start - before)  # earlier queries see none of the tokens
    return Work(request, begin, first, gl.maximum(last - first, 0), start, length, before)


@gluon.jit
def _load_tile(config, work, cache, start):
    """Return the tile of 64 tokens from ``start`` on; keys that do not exist are 0."""
    S: gl.constexpr = scores_layout(config.heads)
    A: gl.constexpr = gl.DotOperandLayout(0, S, 4)
    block, slot, seen = cache.place(work, start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, A)), config.block_size)
    column = gl.arange(0, config.dim, layout=gl.SliceLayout(0, A))
    offset = block * cache.block_stride + slot * cache.slot_stride
    keys = gl.load(cache.pointer + offset[:, None] + column[None, :], mask=seen[:, None], other=0.0)
    position = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    block, slot, seen = cache.place(work, position, config.block_size)
    unit = gl.load(cache.scales + block * cache.scale_block + slot * cache.scale_slot, mask=seen, other=0.0)
    return Tokens(keys, unit, position - (work.before + work.first))


@gluon.jit
def _start(config, tokens, query):
    """Start the products of a tile's keys with a query's heads."""
    acc = gl.zeros([ROWS, config.heads], gl.float32, scores_layout(config.heads))
    return warpgroup_mma(tokens.keys, query.main.permute((1, 0)), acc, use_acc=False, is_async=True)


@gluon.jit
def _columns(x):
    """Reshape ``[rows, heads]`` so that each dimension after the second has two of the heads that a thread holds."""
    HALF: gl.constexpr = x.shape[1] // 8
    parts = gl.permute(gl.reshape(x, [x.shape[0], HALF, 4, 2]), (0, 2, 1, 3))
    if HALF == 8:
        parts = gl.reshape(parts, [x.shape[0], 4, 2, 2, 2, 2])
    else:
        parts = gl.reshape(parts, [x.shape[0], 4, 2, 2, 2])
    return parts


@gluon.jit
def _add(total, x, w):
    """Add the ``max(x, 0) * w`` to ``total`` in sequence, so that each takes one multiply-add."""
    if len(x.shape) == 2:
        total += gl.maximum(x, 0.0) * w
    else:
        x_even, x_odd = gl.split(x)
        w_even, w_odd = gl.split(w)
        total = _add(total, x_even, w_even)
        total = _add(total, x_odd, w_odd)
    return total


@gluon.jit
def _weigh(products, w):
    """Return ``[tokens, 4]``: sums of ``w * max(products, 0)`` over the heads that a thread holds."""
    wide, _ = gl.broadcast(w[None, :], products)
    return _add(0.0, _columns(products), _columns(wide))


@gluon.jit
def _store(target, tokens, sums, i):
    """Write a tile's scores of the program's query ``i``, of the tokens that it sees."""
    score = gl.convert_layout(gl.sum(sums, axis=1), tokens.unit.type.layout) * tokens.unit
    place = gl.arange(0, ROWS, layout=tokens.unit.type.layout).to(gl.int64)
    gl.store(target + place, score, mask=tokens.ahead <= i)


@gluon.jit
def _weights(config, query):
    """Load the weights of a query's heads."""
    return query.rest.load(gl.SliceLayout(0, scores_layout(config.heads)))


@gluon.jit
def _score_in_turn(config, queries, work, tokens, target, width):
    """Score one tile: another group's products run during the sums."""
    for i in range(work.count):
        stage = i % queries.stages
        queries.wait(i)
        query = queries.tile(stage)
        pending = _start(config, tokens, query)
        w = _weights(config, query)
        products = warpgroup_mma_wait(0, deps=[pending])
        queries.release(stage)
        _store(target, tokens, _weigh(products, w), i)
        target += width


@gluon.jit
def _score_at_once(config, queries, work, one, two, target, width):
    """Score two tiles: the product of one runs during the sums of the other."""
    queries.wait(0)
    query = queries.tile(0)
    w = _weights(config, query)
    pending = _start(config, one, query)
    products = warpgroup_mma_wait(0, deps=[pending])
    pending = _start(config, two, query)
    sums = _weigh(products, w)
    products, sums = warpgroup_mma_wait(0, deps=[pending, sums])
    queries.release(0)
    _store(target, one, sums, 0)
    for i in range(1, work.count):
        stage = i % queries.stages
        queries.wait(i)
        query = queries.tile(stage)
        pending = _start(config, one, query)
        sums = _weigh(products, w)
        w = _weights(config, query)
        products, sums = warpgroup_mma_wait(0, deps=[pending, sums])
        pending = _start(config, two, query)
        _store(target + ROWS, two, sums, i - 1)
        target += width
        sums = _weigh(products, w)
        products, sums = warpgroup_mma_wait(0, deps=[pending, sums])
        queries.release(stage)
        _store(target, one, sums, i)
    _store(target + ROWS, two, _weigh(products, w), work.count - 1)


@gluon.jit
def consume(config, queries, work, cache, scores, WHICH: gl.constexpr):
    """Score the tokens of a consumer for all queries of the program."""
    if work.count > 0:
        start = work.start + ROWS * config.tiles * WHICH
        target = scores.pointer + (work.begin + work.first - scores.first_row).to(gl.int64) * scores.width + start
        one = _load_tile(config, work, cache, start)
        if config.tiles == 1:
            _score_in_turn(config, queries, work, one, target, scores.width)
        else:
            two = _load_tile(config, work, cache, start + ROWS)
            _score_at_once(config, queries, work, one, two, target, scores.width)


@gluon.jit
def produce(config, queries, work, query, weights, WEIGHT_TOKEN):
    """Fill the ring with the program's queries and the weights of their heads."""
    L: gl.constexpr = copy_layout(1, KEY_SIZE)
    W: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    LATER: gl.constexpr = queries.stages // 2  # queries that are being copied when another is published
    head = gl.arange(0, config.heads, layout=gl.SliceLayout(1, L))
    column = gl.arange(0, config.heads, layout=W)
    for i in range(work.count):
        stage = i % queries.stages
        token = work.begin + work.first + i
        queries.acquire(i)
        tile = queries.tile(stage)
        copy_rows(tile.main, query.pointer, query.offsets(token, head), head >= 0, 0, config.dim, L)
        source = weights + token.to(gl.int64) * WEIGHT_TOKEN
        async_load(tile.rest, source + column, mask=column >= 0)
        async_copy.commit_group()
        publish(queries.full, gl.where(i >= LATER, (i - LATER) % queries.stages, -1), LATER)
    for behind in gl.static_range(LATER - 1, -1, -1):
        i = work.count - 1 - behind
        publish(queries.full, gl.where(i >= 0, i % queries.stages, -1), behind)


@gluon.jit
def alloc(config, dtype: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Allocate the ring: a stage has a query and, after it, the weights of its heads."""
    query = buffers(dtype, STAGES, config.heads, config.dim)
    weights = gl.allocate_shared_memory(gl.float32, [STAGES, config.heads], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = barriers(STAGES)
    free = barriers(STAGES)
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(free.index(index), count=CONSUMERS)
    return Ring(query, weights, full, free, 0, STAGES)


# Triton's launcher takes only numbers and tensors, so the aggregates are made here.
@gluon.jit(do_not_specialize=["first_row", "rows", "width", "TABLE_ROW"])
def index_scores(
    query,
    weights,
    cache,
    scales,
    block_table,
    query_starts,
    lengths,
    scores,
    first_row,
    rows,
    width,
    TABLE_ROW,
    QUERY_TOKEN,
    QUERY_HEAD,
    WEIGHT_TOKEN,
    CACHE_BLOCK,
    CACHE_SLOT,
    SCALE_BLOCK,
    SCALE_SLOT,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid: tiles of tokens, tiles of ``BLOCK_M`` queries, requests; as the plain kernel for scores.

    Rows of ``scores`` are the queries from ``first_row`` on.
    """
    config = Config(HEADS, DIM, BLOCK_SIZE, TILES)
    queries = alloc(config, query.dtype.element_ty, CONSUMERS, STAGES)
    work = find_work(query_starts, lengths, first_row, rows, ROWS * TILES * CONSUMERS, BLOCK_M)
    source = Rows(query, gl.to_tensor(QUERY_TOKEN), gl.to_tensor(QUERY_HEAD))
    keys = IndexCache(
        cache, gl.to_tensor(CACHE_BLOCK), gl.to_tensor(CACHE_SLOT), scales, gl.to_tensor(SCALE_BLOCK),
        gl.to_tensor(SCALE_SLOT), block_table, TABLE_ROW,
    )  # fmt: skip
    target = Scores(scores, first_row, width)
    weight_token = gl.to_tensor(WEIGHT_TOKEN)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (config, queries, work, keys, target, 0)),
                (consume, (config, queries, work, keys, target, 1)),
                (produce, (config, queries, work, source, weights, weight_token)),
            ],
            [4, 1],
            [216, 72],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consume, (config, queries, work, keys, target, 0)),
                (consume, (config, queries, work, keys, target, 1)),
                (consume, (config, queries, work, keys, target, 2)),
                (produce, (config, queries, work, source, weights, weight_token)),
            ],
            [4, 4, 1],
            [144, 144, 80],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (config, queries, work, keys, target, 0)),
                (consume, (config, queries, work, keys, target, 1)),
                (consume, (config, queries, work, keys, target, 2)),
                (consume, (config, queries, work, keys, target, 3)),
                (produce, (config, queries, work, source, weights, weight_token)),
            ],
            [4, 4, 4, 1],
            [96, 96, 96, 96],
        )
