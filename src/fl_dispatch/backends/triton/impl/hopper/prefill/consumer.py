"""The consumer warps, which multiply: each consumer has 64 queries, its own softmax and its own sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..aggregates import aggregate
from ..pipeline import Tile
from ..products import ROWS, mma_layout, scale_rows, start_scores
from ..rows import store_layout, store_rows
from ..softmax import LN2, LOG2E, NOTHING, Mask, inverse, pack, saw_keys, softmax, unpack
from .config import BLOCK_N
from .scheduler import receive


@aggregate
class Sums:
    """State that a consumer carries from tile to tile.

    ``p`` holds the packed weights of the last tile; their product with its values is not yet in ``acc``.
    """

    acc: gl.tensor
    m_i: gl.tensor
    l_i: gl.tensor
    p: gl.tensor


@gluon.jit
def _key_loop(config, pipeline, sums, i, n, stop, q, mask, qk_scale, MASKED: gl.constexpr):
    """Process key tiles ``n``, ``n - 1`` … ``stop``; the first is the program's tile ``i``, in shared memory already.

    The product with the former tile's values runs during this tile's softmax.
    """
    keys = pipeline.keys
    values = pipeline.values
    dtype: gl.constexpr = values.main.dtype
    while n >= stop:
        stage = i % keys.stages
        last = (i - 1) % values.stages
        p = unpack(sums.p, sums.acc, dtype)
        pending = start_scores(q, keys.tile(stage), BLOCK_N, config.rest > 0)
        values.wait(i - 1)
        adding = warpgroup_mma(p, values.tile(last).main, sums.acc, is_async=True)
        qk = warpgroup_mma_wait(1, deps=[pending])
        keys.release(stage)
        p_new, m_i, l_i, alpha = softmax(qk, sums.m_i, sums.l_i, n * BLOCK_N, mask, qk_scale, MASKED)
        # This wait ends a basic block. Without it ptxas moves the softmax after the product, which it should overlap.
        keys.wait_if_any(i + 1, n)
        acc, p, p_new, l_i, alpha = warpgroup_mma_wait(0, deps=[adding, p, p_new, l_i, alpha])
        values.release(last)
        sums = Sums(scale_rows(acc, alpha), m_i, l_i, pack(p_new, dtype))
        n -= 1
        i += 1
    return sums, i, n


@gluon.jit
def _first_scores(config, pipeline, i, q):
    """Compute the scores of an item's first tile of keys, the program's tile ``i``."""
    stage = i % pipeline.keys.stages
    pipeline.keys.wait(i)
    pending = start_scores(q, pipeline.keys.tile(stage), BLOCK_N, config.rest > 0)
    qk = warpgroup_mma_wait(0, deps=[pending])
    pipeline.keys.release(stage)
    return qk


@gluon.jit
def _last_product(pipeline, sums, i):
    """Return the sums with the values of tile ``i`` added."""
    values = pipeline.values
    stage = i % values.stages
    p = unpack(sums.p, sums.acc, values.main.dtype)
    values.wait(i)
    adding = warpgroup_mma(p, values.tile(stage).main, sums.acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=[adding, p])
    values.release(stage)
    return acc


@gluon.jit
def consume(config, pipeline, out, lse, LSE_HEAD, SCALE, WHICH: gl.constexpr):
    """Process all work items of a program, for queries ``64 * WHICH`` to ``64 * WHICH + 63`` of each."""
    S: gl.constexpr = mma_layout(BLOCK_N)
    A: gl.constexpr = mma_layout(config.dim_v)
    W: gl.constexpr = store_layout(ROWS, config.dim_v)
    queries = pipeline.queries
    qk_scale = SCALE * LOG2E
    i = 0  # tiles so far
    done = 0  # items so far
    queries.wait(0)
    work = receive(pipeline.messages.index(0))
    while work.head >= 0:
        tiles, whole = work.key_tiles(config.causal)
        row = work.first + ROWS * WHICH
        tile = queries.tile(done % queries.stages)
        q = Tile(tile.main.slice(ROWS * WHICH, ROWS), tile.rest.slice(ROWS * WHICH, ROWS))
        # This order of additions matters: if the lane is added to the row first, ptxas orders the softmax differently.
        position = work.length - work.new + row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        mask = Mask(position, work.length, config.causal)
        acc = gl.zeros([ROWS, config.dim_v], gl.float32, A)
        m_i = gl.full([ROWS], NOTHING, gl.float32, gl.SliceLayout(1, S))
        l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        qk = _first_scores(config, pipeline, i, q)
        p, m_i, l_i, _alpha = softmax(qk, m_i, l_i, (tiles - 1) * BLOCK_N, mask, qk_scale, True)
        sums = Sums(acc, m_i, l_i, pack(p, pipeline.values.main.dtype))
        i += 1
        n = tiles - 2
        pipeline.keys.wait_if_any(i, tiles - 1)
        sums, i, n = _key_loop(config, pipeline, sums, i, n, whole, q, mask, qk_scale, True)
        sums, i, n = _key_loop(config, pipeline, sums, i, n, 0, q, mask, qk_scale, False)
        acc = scale_rows(_last_product(pipeline, sums, i - 1), inverse(sums.m_i, sums.l_i))
        token = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, W))
        store_rows(out, acc, work, token, work.head, 0, W)
        if config.lse:
            total = gl.where(saw_keys(sums.m_i), (sums.m_i + gl.log2(sums.l_i)) * LN2, float("-inf"))
            token = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
            target = lse + work.head.to(gl.int64) * LSE_HEAD + work.begin + token
            gl.store(target, total, mask=token < work.new)
        done += 1
        queries.wait(done)
        work = receive(pipeline.messages.index(done % queries.stages))
