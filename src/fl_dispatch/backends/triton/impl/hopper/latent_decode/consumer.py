"""The consumer warps, which multiply: each consumer computes all scores of 64 rows and sums half of the values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..aggregates import aggregate
from ..pipeline import Tile
from ..products import ROWS, mma_layout, scale_rows, start_scores
from ..rows import store_layout, store_rows
from ..softmax import LOG2E, NOTHING, Mask, inverse, pack, softmax, unpack
from .work import HALF, KEYS, find_work


@aggregate
class Partial:
    """Memory for results of programs that share a request's keys: sums ``acc``, ``m_i`` and ``l_i`` of each row."""

    sums: gl.tensor
    statistics: gl.tensor
    splits: gl.tensor

    @gluon.jit
    def places(self, config, work, L: gl.constexpr):
        """Numbers of a program's rows among the partial results, and whether the rows exist."""
        token, head, valid = work.rows(L)
        row = (gl.program_id(1) * config.most_new + token).to(gl.int64) * config.heads + head
        return row * self.splits + gl.program_id(2), valid


@aggregate
class Sums:
    """State that a consumer carries from tile to tile.

    ``p`` holds the packed weights of the last tile; their product with its values is added to ``acc`` after
    ``alpha`` scales ``acc``.
    """

    acc: gl.tensor
    m_i: gl.tensor
    l_i: gl.tensor
    p: gl.tensor
    alpha: gl.tensor


@gluon.jit
def _scores(pipeline, i):
    """Scores of the program's tile ``i``, once its two pieces are there."""
    left = pipeline.left
    right = pipeline.right
    stage = i % left.stages
    zero = i // (1 << 30)  # unknown to the compiler, which else keeps all addresses in registers, and spills
    left.wait(i)
    q_left = Tile(pipeline.q_left.index(zero), pipeline.q_left.index(zero))
    qk = start_scores(q_left, left.tile(stage), KEYS, False)
    right.wait(i)
    tile = right.tile(stage)
    qk = warpgroup_mma(pipeline.q_right.index(zero), tile.main.permute((1, 0)), qk, is_async=True)
    qk = warpgroup_mma(pipeline.q_rotary.index(zero), tile.rest.permute((1, 0)), qk, is_async=True)
    return warpgroup_mma_wait(0, deps=[qk])


@gluon.jit
def _add_values(values, sums, stage):
    """The sums with the values of the tile in a stage; ``sums`` has the weights of that tile."""
    p = unpack(sums.p, sums.acc, values.main.dtype)
    acc = scale_rows(sums.acc, sums.alpha)
    adding = warpgroup_mma(p, values.tile(stage).main, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=[adding, p])
    return acc


@gluon.jit
def _key_loop(pipeline, own, other, sums, i, n, stop, work, mask, qk_scale, MASKED: gl.constexpr):
    """Key tiles ``n``, ``n - 1`` … ``stop``, the first of which is the program's tile ``i``.

    The stage of the tile before is released before this tile is waited for, so that its copies have the most time.
    """
    while n >= stop:
        last = (i - 1) % own.stages
        acc = _add_values(own, sums, last)
        own.release(last)
        qk = _scores(pipeline, i)
        other.release(i % other.stages)
        p, m_i, l_i, alpha = softmax(qk, sums.m_i, sums.l_i, work.start + n * KEYS, mask, qk_scale, MASKED)
        sums = Sums(acc, m_i, l_i, pack(p, own.main.dtype), alpha)
        n -= 1
        i += 1
    return sums, i, n


@gluon.jit
def consume(config, pipeline, query_starts, lengths, out, partial, SCALE, WHICH: gl.constexpr):
    """Half ``WHICH`` of the results of a program's rows.

    A stage's half of values is released when they are added up, the other half when the scores are there. The second
    consumer begins when the first has its first scores, so that their softmaxes do not fall together.
    """
    S: gl.constexpr = mma_layout(KEYS)
    A: gl.constexpr = mma_layout(HALF)
    own = pipeline.left if WHICH == 0 else pipeline.right
    other = pipeline.right if WHICH == 0 else pipeline.left
    work = find_work(config, query_starts, lengths, partial.splits)
    token, _head, _valid = work.rows(gl.SliceLayout(1, S))
    mask = Mask(work.length - work.new + token, work.stop, config.causal)
    qk_scale = SCALE * LOG2E
    acc = gl.zeros([ROWS, HALF], gl.float32, A)
    m_i = gl.full([ROWS], NOTHING, gl.float32, gl.SliceLayout(1, S))
    l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    if work.tiles > 0:
        if WHICH == 1:
            mbarrier.wait(pipeline.scored.index(0), 0)
        qk = _scores(pipeline, 0)
        if WHICH == 0:
            mbarrier.arrive(pipeline.scored.index(0))
        other.release(0)
        n = work.tiles - 1
        p, m_i, l_i, alpha = softmax(qk, m_i, l_i, work.start + n * KEYS, mask, qk_scale, True)
        sums = Sums(acc, m_i, l_i, pack(p, own.main.dtype), alpha)
        i = gl.to_tensor(1)
        sums, i, n = _key_loop(pipeline, own, other, sums, i, n - 1, work.whole, work, mask, qk_scale, True)
        sums, i, n = _key_loop(pipeline, own, other, sums, i, n, 0, work, mask, qk_scale, False)
        acc = _add_values(own, sums, (i - 1) % own.stages)
        m_i = sums.m_i
        l_i = sums.l_i
    if not config.divided:
        W: gl.constexpr = store_layout(ROWS, HALF)
        acc = scale_rows(acc, inverse(m_i, l_i))
        token, head, _valid = work.rows(gl.SliceLayout(1, W))
        store_rows(out, acc, work, token, head, WHICH * HALF, W)
    elif config.listed or work.start < work.length:  # a part that causality hides adds nothing, but is read
        column = WHICH * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, A))
        place, valid = partial.places(config, work, gl.SliceLayout(1, A))
        gl.store(partial.sums + (place * (2 * HALF))[:, None] + column[None, :], acc, mask=valid[:, None])
        if WHICH == 0:
            place, valid = partial.places(config, work, gl.SliceLayout(1, S))
            gl.store(partial.statistics + place * 2, m_i, mask=valid)
            gl.store(partial.statistics + place * 2 + 1, l_i, mask=valid)
