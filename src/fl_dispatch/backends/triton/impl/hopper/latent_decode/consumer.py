"""The consumer warps, which multiply: each consumer weighs every other tile, and sums half of the values of all."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..aggregates import aggregate
from ..pipeline import Tile
from ..products import ROWS, mma_layout, scale_rows, start_scores
from ..rows import store_layout, store_rows
from ..softmax import LOG2E, NOTHING, Mask, inverse, softmax
from .work import HALF, KEYS, find_work


@aggregate
class Partial:
    """Memory for results of programs that share a request's keys: sums ``acc``, ``m_i`` and ``l_i`` of each row."""

    sums: gl.tensor
    statistics: gl.tensor
    splits: gl.tensor

    @gluon.jit
    def places(self, config, work, L: gl.constexpr):
        """Numbers of an item's rows among the partial results, and whether the rows exist."""
        token, head, valid = work.rows(L)
        row = (work.request * config.most_new + token).to(gl.int64) * config.heads + head
        return row * self.splits + work.split, valid


@aggregate
class Sums:
    """State that a consumer carries from pair to pair of tiles.

    ``m_i`` covers all tiles, as in the other consumer; ``l_i`` only the tiles that this consumer weighs.
    """

    acc: gl.tensor
    m_i: gl.tensor
    l_i: gl.tensor


@gluon.jit
def _scores(config, pipeline, stage, pair, n):
    """Wait for both pieces of a stage's tile and compute its scores; those of the last pair release the queries."""
    left = pipeline.left
    right = pipeline.right
    zero = pair // (1 << 30)  # 0; the compiler must not know, or it keeps all addresses in registers and spills
    left.wait_stage(stage, pair & 1)
    q_left = Tile(pipeline.q_left.index(zero), pipeline.q_left.index(zero))
    qk = start_scores(q_left, left.tile(stage), KEYS, False)
    right.wait_stage(stage, pair & 1)
    tile = right.tile(stage)
    qk = warpgroup_mma(pipeline.q_right.index(zero), tile.main.permute((1, 0)), qk, is_async=True)
    qk = warpgroup_mma(pipeline.q_rotary.index(zero), tile.rest.permute((1, 0)), qk, is_async=True)
    qk = warpgroup_mma_wait(0, deps=[qk])
    if config.persistent:  # noqa: SIM102 - known to the compiler, which the other condition is not
        if n < 2:
            mbarrier.arrive(pipeline.q_free)
    return qk


@gluon.jit
def _hand_over(pipeline, stage, p, m_i):
    """Pass the weights of a tile and the new maxima to the other consumer.

    The weights overwrite the rotary part of the tile's keys, because its scores are complete.
    """
    pipeline.right.rest.index(stage).store(p)
    pipeline.rows.index(stage).store(m_i)
    fence_async_shared()
    mbarrier.arrive(pipeline.weighed.index(stage))


@gluon.jit
def _take_over(pipeline, stage, phase, L: gl.constexpr):
    """Wait for the other consumer's weights, and return the rows' maxima that came with them."""
    mbarrier.wait(pipeline.weighed.index(stage), phase)
    return pipeline.rows.index(stage).load(L)


@gluon.jit
def _start_own(acc, p, values):
    """Start to add the values that this consumer has weighed."""
    p = gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(p, values, acc, is_async=True), p


@gluon.jit
def _first_pair(config, pipeline, sums, pair, turn, n, start, mask, qk_scale, MASKED: gl.constexpr):
    """Compute the softmax weights of a pair's first tile, and add the left half of both tiles' values."""
    left = pipeline.left
    right = pipeline.right
    zero = pair // (1 << 30)
    L: gl.constexpr = sums.m_i.type.layout
    qk = _scores(config, pipeline, zero, pair, n)
    p, m_first, l_i, alpha = softmax(qk, sums.m_i, sums.l_i, start, mask, qk_scale, MASKED)
    p = p.to(left.main.dtype)
    _hand_over(pipeline, zero, p, m_first)
    adding, p = _start_own(scale_rows(sums.acc, alpha), p, left.main.index(zero))
    acc, p = warpgroup_mma_wait(0, deps=[adding, p])
    left.release(zero)
    m_i = _take_over(pipeline, zero + 1, turn & 1, L)
    alpha = gl.exp2(m_first - m_i)
    acc = scale_rows(acc, alpha)
    adding = warpgroup_mma(right.rest.index(zero + 1), left.main.index(zero + 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[adding])
    left.release(zero + 1)
    right.release(zero + 1)
    return Sums(acc, m_i, l_i * alpha)


@gluon.jit
def _second_pair(config, pipeline, sums, pair, turn, n, start, mask, qk_scale, MASKED: gl.constexpr):
    """Compute the softmax weights of a pair's second tile, and add the right half of both tiles' values.

    The softmax overlaps with the product of the first tile's values.
    """
    right = pipeline.right
    zero = pair // (1 << 30)
    L: gl.constexpr = sums.m_i.type.layout
    qk = _scores(config, pipeline, zero + 1, pair, n)
    m_first = _take_over(pipeline, zero, turn & 1, L)
    alpha = gl.exp2(sums.m_i - m_first)
    acc = scale_rows(sums.acc, alpha)
    adding = warpgroup_mma(right.rest.index(zero), right.main.index(zero), acc, is_async=True)
    p, m_i, l_i, alpha = softmax(qk, m_first, sums.l_i * alpha, start - KEYS, mask, qk_scale, MASKED)
    p = p.to(right.main.dtype)
    _hand_over(pipeline, zero + 1, p, m_i)
    acc, p, alpha = warpgroup_mma_wait(0, deps=[adding, p, alpha])
    right.release(zero)
    adding, p = _start_own(scale_rows(acc, alpha), p, right.main.index(zero + 1))
    acc, p = warpgroup_mma_wait(0, deps=[adding, p])
    right.release(zero + 1)
    return Sums(acc, m_i, l_i)


@gluon.jit
def _pairs(
    config, pipeline, sums, pair, turn, n, stop, work, mask, qk_scale, WHICH: gl.constexpr, MASKED: gl.constexpr
):
    """Process pairs of key tiles: ``n`` and ``n - 1``, ``n - 2`` and ``n - 3`` … until the first is below ``stop``."""
    while n >= stop:
        start = work.start + n * KEYS
        if WHICH == 0:
            sums = _first_pair(config, pipeline, sums, pair, turn, n, start, mask, qk_scale, MASKED)
        else:
            sums = _second_pair(config, pipeline, sums, pair, turn, n, start, mask, qk_scale, MASKED)
        n -= 2
        pair += 1
        turn += 1
    return sums, pair, turn, n


@gluon.jit
def _all_weights(pipeline, l_i, turn, WHICH: gl.constexpr):
    """Exchange and add both consumers' sums of weights, after the last pair."""
    L: gl.constexpr = l_i.type.layout
    if WHICH == 0:
        pipeline.rows.index(0).store(l_i)
        mbarrier.arrive(pipeline.weighed.index(0))
        other = _take_over(pipeline, 1, turn & 1, L)
    else:
        other = _take_over(pipeline, 0, turn & 1, L)
        pipeline.rows.index(1).store(l_i)
        mbarrier.arrive(pipeline.weighed.index(1))
    return l_i + other


@gluon.jit
def _write(config, work, out, partial, acc, m_i, l_i, WHICH: gl.constexpr):
    """Write half ``WHICH`` of the results of an item's rows, or of their share."""
    S: gl.constexpr = m_i.type.layout
    A: gl.constexpr = acc.type.layout
    if not config.divided:
        W: gl.constexpr = store_layout(ROWS, HALF)
        acc = scale_rows(acc, inverse(m_i, l_i))
        token, head, _valid = work.rows(gl.SliceLayout(1, W))
        store_rows(out, acc, work, token, head, WHICH * HALF, W)
    elif config.listed or work.start < work.length:  # a share that the causal mask hides adds nothing, but is read
        column = WHICH * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, A))
        place, valid = partial.places(config, work, gl.SliceLayout(1, A))
        gl.store(partial.sums + (place * (2 * HALF))[:, None] + column[None, :], acc, mask=valid[:, None])
        if WHICH == 0:
            place, valid = partial.places(config, work, S)
            gl.store(partial.statistics + place * 2, m_i, mask=valid)
            gl.store(partial.statistics + place * 2 + 1, l_i, mask=valid)


@gluon.jit
def _consume_item(config, pipeline, items, item, out, partial, SCALE, pair, turn, WHICH: gl.constexpr):
    """Compute half ``WHICH`` of an item's results; return the new ``pair`` and ``turn``."""
    S: gl.constexpr = mma_layout(KEYS)
    A: gl.constexpr = mma_layout(HALF)
    work = find_work(config, items, item)
    token, _head, _valid = work.rows(gl.SliceLayout(1, S))
    mask = Mask(work.length - work.new + token, work.stop, config.causal)
    qk_scale = SCALE * LOG2E
    acc = gl.zeros([ROWS, HALF], gl.float32, A)
    m_i = gl.full([ROWS], NOTHING, gl.float32, gl.SliceLayout(1, S))
    l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    if work.tiles > 0:
        if WHICH == 1:
            # This stage's tile comes with the queries; the stage is not filled again before this consumer releases it.
            pipeline.right.wait_stage(0, pair & 1)
        sums = Sums(acc, m_i, l_i)
        n = work.tiles - 1
        sums, pair, turn, n = _pairs(
            config, pipeline, sums, pair, turn, n, work.whole, work, mask, qk_scale, WHICH, True
        )
        sums, pair, turn, n = _pairs(config, pipeline, sums, pair, turn, n, 0, work, mask, qk_scale, WHICH, False)
        acc = sums.acc
        m_i = sums.m_i
        l_i = _all_weights(pipeline, sums.l_i, turn, WHICH)
        turn += 1
    _write(config, work, out, partial, acc, m_i, l_i, WHICH)
    return pair, turn


@gluon.jit
def consume(config, pipeline, items, out, partial, SCALE, WHICH: gl.constexpr):
    """Compute half ``WHICH`` of the results of a program's items.

    ``pair`` counts pairs of tiles, and ``turn`` also the items, after each of which the consumers exchange sums.
    """
    first = gl.program_id(0)
    pair = gl.to_tensor(0)
    turn = pair + 0
    if config.persistent:
        for item in range(first, items.number(), gl.num_programs(0)):
            pair, turn = _consume_item(config, pipeline, items, item, out, partial, SCALE, pair, turn, WHICH)
    else:
        _consume_item(config, pipeline, items, first, out, partial, SCALE, pair, turn, WHICH)
