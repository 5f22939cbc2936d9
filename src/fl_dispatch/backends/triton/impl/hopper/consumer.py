"""The warps that multiply: each group has 64 queries, its own softmax and its own sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .schedule import BLOCK_N, key_tiles, piece, request_span

ROWS = gl.constexpr(64)
"""Queries of a group."""


@gluon.jit
def _wait_full(barrier, number, there, STAGES: gl.constexpr, LATE: gl.constexpr):
    """Wait until the buffer of tile ``number`` is full."""
    mbarrier.wait(barrier, (number // STAGES) & 1, pred=there)
    if not LATE:
        fence_async_shared()


@gluon.jit
def _scores(q, q_rest, k, k_rest, S: gl.constexpr, REST: gl.constexpr):
    """Start the product of queries and keys."""
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if REST > 0:
        scores = warpgroup_mma(q_rest, k_rest.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _softmax(scores, top, below, start, place, length, factor, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    """Weights of a tile, and what its largest scores make of the sums before it."""
    if MASKED:
        column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores.type.layout))
        seen = (start + column < length)[None, :]
        if CAUSAL:
            seen = seen & (start + column[None, :] <= place[:, None])
        # Finite, so that rows which see nothing here have no NaN; tiles come from the last to the first, and what such
        # a row adds is scaled by 0 once it sees a key.
        scores = gl.where(seen, scores * factor, -1e30)
        new_top = gl.maximum(top, gl.max(scores, axis=1))
        weights = gl.exp2(scores - new_top[:, None])
    else:
        new_top = gl.maximum(top, gl.max(scores, axis=1) * factor)
        weights = gl.exp2(scores * factor - new_top[:, None])
    decay = gl.exp2(top - new_top)
    return weights, new_top, below * decay + gl.sum(weights, axis=1), decay


@gluon.jit
def _steps(
    acc,
    top,
    below,
    weights,
    i,
    tile,
    turns,
    stop,
    q,
    q_rest,
    buffers,
    barriers,
    place,
    length,
    factor,
    S: gl.constexpr,
    WHICH: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    REST: gl.constexpr,
    STAGES: gl.constexpr,
    ORDERED: gl.constexpr,
    LATE: gl.constexpr,
):
    """Tiles ``tile``, ``tile - 1`` … ``stop``. ``weights`` are those of the tile before, whose values are still to be
    added: that product runs beside the softmax of this tile. The keys of tile ``i`` have been waited for.
    """
    A: gl.constexpr = acc.type.layout
    _, _, k_bufs, k_rest_bufs, v_bufs = buffers
    full, k_free, v_free, _, turn_a, turn_b = barriers
    while tile >= stop:
        stage = i % STAGES
        before = (i - 1) % STAGES
        if ORDERED:
            mbarrier.wait(turn_a if WHICH == 0 else turn_b, (turns & 1) ^ (1 - WHICH))
            turns += 1
        pending = _scores(q, q_rest, k_bufs.index(stage), k_rest_bufs.index(stage), S, REST)
        _wait_full(full.index(STAGES + before), i - 1, True, STAGES, LATE)
        adding = warpgroup_mma(weights, v_bufs.index(before), acc, is_async=True)
        if ORDERED:
            mbarrier.arrive(turn_b if WHICH == 0 else turn_a)
        scores = warpgroup_mma_wait(1, deps=[pending])
        mbarrier.arrive(k_free.index(stage))
        new, top, below, decay = _softmax(scores, top, below, tile * BLOCK_N, place, length, factor, CAUSAL, MASKED)
        # This wait ends a basic block. Without it ptxas moves the softmax behind the product that it shall run beside.
        _wait_full(full.index((i + 1) % STAGES), i + 1, tile > 0, STAGES, LATE)
        acc, weights, new, below, decay = warpgroup_mma_wait(0, deps=[adding, weights, new, below, decay])
        mbarrier.arrive(v_free.index(before))
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, A))[:, None]
        weights = gl.convert_layout(new.to(weights.dtype), weights.type.layout)
        tile -= 1
        i += 1
    return acc, top, below, weights, i, tile, turns


@gluon.jit
def consume(
    query_starts,
    key_lengths,
    out,
    lse,
    buffers,
    barriers,
    requests,
    heads,
    least_new,
    OUT_TOKEN,
    OUT_HEAD,
    LSE_HEAD,
    SCALE,
    WHICH: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
    REST: gl.constexpr,
    DIM_V: gl.constexpr,
    STAGES: gl.constexpr,
    ORDERED: gl.constexpr,
    LATE: gl.constexpr,
):
    """All pieces of a program, for its queries ``64 * WHICH`` to ``64 * WHICH + 63``."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    q_full: gl.constexpr = 2 * STAGES
    q_buf, q_rest_buf, k_bufs, k_rest_bufs, v_bufs = buffers
    full, k_free, v_free, q_free, _, _ = barriers
    q = q_buf.slice(ROWS * WHICH, ROWS)
    q_rest = q
    if REST > 0:
        q_rest = q_rest_buf.slice(ROWS * WHICH, ROWS)
    programs = gl.num_programs(0)
    factor = SCALE * 1.4426950408889634  # takes a score to base 2
    turns = 0
    i = 0
    done = 0
    count = 0
    for request in range(requests):
        begin, new, length, _key_begin, tiles_m = request_span(query_starts, key_lengths, request, least_new, PAGED)
        works = tiles_m * heads
        for turn in range(count // programs, gl.cdiv(count + works, programs)):
            work, first, head = piece(turn, count, tiles_m, heads)
            tiles, whole = key_tiles(new, length, first, CAUSAL)
            if (work >= 0) & (work < works):
                row = first + ROWS * WHICH
                acc = gl.zeros([ROWS, DIM_V], gl.float32, A)
                top = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, S))
                below = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
                if tiles > 0:
                    place = length - new + row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
                    stage = i % STAGES
                    mbarrier.wait(full.index(q_full), done & 1)
                    _wait_full(full.index(stage), i, True, STAGES, LATE)
                    pending = _scores(q, q_rest, k_bufs.index(stage), k_rest_bufs.index(stage), S, REST)
                    scores = warpgroup_mma_wait(0, deps=[pending])
                    mbarrier.arrive(k_free.index(stage))
                    start = (tiles - 1) * BLOCK_N
                    new_weights, top, below, _decay = _softmax(
                        scores, top, below, start, place, length, factor, CAUSAL, True
                    )
                    weights = gl.convert_layout(new_weights.to(v_bufs.dtype), P)
                    i += 1
                    tile = tiles - 2
                    _wait_full(full.index(i % STAGES), i, tile >= 0, STAGES, LATE)
                    acc, top, below, weights, i, tile, turns = _steps(
                        acc, top, below, weights, i, tile, turns, whole, q, q_rest, buffers, barriers, place, length,
                        factor, S, WHICH, CAUSAL, True, REST, STAGES, ORDERED, LATE,
                    )  # fmt: skip
                    acc, top, below, weights, i, tile, turns = _steps(
                        acc, top, below, weights, i, tile, turns, 0, q, q_rest, buffers, barriers, place, length,
                        factor, S, WHICH, CAUSAL, False, REST, STAGES, ORDERED, LATE,
                    )  # fmt: skip
                    mbarrier.arrive(q_free)
                    last = (i - 1) % STAGES
                    _wait_full(full.index(STAGES + last), i - 1, True, STAGES, LATE)
                    adding = warpgroup_mma(weights, v_bufs.index(last), acc, is_async=True)
                    acc, weights = warpgroup_mma_wait(0, deps=[adding, weights])
                    mbarrier.arrive(v_free.index(last))
                    done += 1
                some = top > -1e29
                inverse = gl.where(some, 1.0 / below, 0.0)
                acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, A))[:, None]
                token = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, A))
                dim_v = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, A))
                target = out + ((begin + token).to(gl.int64) * OUT_TOKEN + head * OUT_HEAD)[:, None]
                gl.store(target + dim_v[None, :], acc.to(out.dtype.element_ty), mask=(token < new)[:, None])
                if LSE:
                    token = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
                    total = gl.where(some, (top + gl.log2(below)) * 0.6931471805599453, float("-inf"))
                    gl.store(lse + head.to(gl.int64) * LSE_HEAD + begin + token, total, mask=token < new)
        count += works
