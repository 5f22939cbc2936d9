"""The warps that multiply: each group computes all scores of 64 rows, and adds up half of their values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .latent_schedule import BUFFERS, HALF, KEYS, ROWS, piece_of_work, rows_of
from .softmax import pack, softmax, unpack


@gluon.jit
def _score(buffers, barriers, i):
    """Scores of the program's tile ``i``, once its pieces are there."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    q_left, q_right, q_rotary, left_bufs, right_bufs, rotary_bufs = buffers
    left_full, right_full, _left_free, _right_free, _scored = barriers
    stage = i % BUFFERS
    zero = i // (1 << 30)  # unknown to the compiler, which else keeps all addresses in registers, and spills
    phase = (i // BUFFERS) & 1
    zeros = gl.zeros([ROWS, KEYS], gl.float32, S)
    mbarrier.wait(left_full.index(stage), phase)
    scores = warpgroup_mma(
        q_left.index(zero), left_bufs.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(right_full.index(stage), phase)
    scores = warpgroup_mma(q_right.index(zero), right_bufs.index(stage).permute((1, 0)), scores, is_async=True)
    return warpgroup_mma(q_rotary.index(zero), rotary_bufs.index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _multiply(
    acc,
    top,
    below,
    weights,
    decay,
    i,
    tile,
    last,
    buffers,
    barriers,
    place,
    start,
    stop,
    factor,
    WHICH: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Tiles ``tile``, ``tile - 1`` … ``last``, the first of which is the program's tile ``i``.

    ``weights`` are packed, and those of the tile before; their values are still to be added, to sums to be scaled by
    ``decay``. Their buffer is given back before this tile is waited for, so that its loads have the most time.
    """
    A: gl.constexpr = acc.type.layout
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    values = buffers[3 + WHICH]
    own_free = barriers[2 + WHICH]
    other_free = barriers[3 - WHICH]
    while tile >= last:
        before = (i - 1) % BUFFERS
        half = unpack(weights, values.dtype, P)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, A))[:, None]
        adding = warpgroup_mma(half, values.index(before), acc, is_async=True)
        acc, half = warpgroup_mma_wait(0, deps=[adding, half])
        mbarrier.arrive(own_free.index(before))
        pending = _score(buffers, barriers, i)
        scores = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(other_free.index(i % BUFFERS))
        new_weights, top, below, decay = softmax(
            scores, top, below, start + tile * KEYS, place, stop, factor, CAUSAL, MASKED
        )
        weights = pack(new_weights, values.dtype)
        tile -= 1
        i += 1
    return acc, top, below, weights, decay, i, tile


@gluon.jit
def _store(out, acc, begin, new, OUT_TOKEN, OUT_HEAD, WHICH: gl.constexpr, HEADS: gl.constexpr):
    """Write a group's half of the results."""
    # As products leave them, but with 16 bytes in a row a thread: four threads swap what they have, and write 64 bytes.
    W: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, HALF],
    )
    token, head, valid = rows_of(new, HEADS, gl.SliceLayout(1, W))
    rows = (begin + token).to(gl.int64) * OUT_TOKEN + head.to(gl.int64) * OUT_HEAD
    column = WHICH * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, W))
    result = gl.convert_layout(acc.to(out.dtype.element_ty), W)
    gl.store(out + rows[:, None] + column[None, :], result, mask=valid[:, None])


@gluon.jit
def _parts(new, splits, HEADS: gl.constexpr, MOST_NEW: gl.constexpr, L: gl.constexpr):
    """Numbers of the partial results of a program's rows, and whether the rows exist."""
    token, head, valid = rows_of(new, HEADS, L)
    row = (gl.program_id(1) * MOST_NEW + token).to(gl.int64) * HEADS + head
    return row * splits + gl.program_id(2), valid


@gluon.jit
def attend(
    query_starts,
    lengths,
    out,
    partial,
    statistics,
    buffers,
    barriers,
    splits,
    OUT_TOKEN,
    OUT_HEAD,
    SCALE,
    WHICH: gl.constexpr,
    HEADS: gl.constexpr,
    CAUSAL: gl.constexpr,
    MOST_NEW: gl.constexpr,
    DIVIDED: gl.constexpr,
):
    """Half ``WHICH`` of the results of a program's rows.

    The second group begins when the first has its first scores, so that their softmaxes do not fall together.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    values = buffers[3 + WHICH]
    begin, new, length, start, stop, tiles, whole = piece_of_work(query_starts, lengths, splits, HEADS, CAUSAL, DIVIDED)
    token, _head, _valid = rows_of(new, HEADS, gl.SliceLayout(1, S))
    place = length - new + token
    factor = SCALE * 1.4426950408889634  # takes a score to base 2
    acc = gl.zeros([ROWS, HALF], gl.float32, A)
    top = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, S))
    below = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    if tiles > 0:
        if WHICH == 1:
            mbarrier.wait(barriers[4].index(0), 0)
        pending = _score(buffers, barriers, 0)
        scores = warpgroup_mma_wait(0, deps=[pending])
        if WHICH == 0:
            mbarrier.arrive(barriers[4].index(0))
        mbarrier.arrive(barriers[3 - WHICH].index(0))
        tile = tiles - 1
        new_weights, top, below, decay = softmax(
            scores, top, below, start + tile * KEYS, place, stop, factor, CAUSAL, True
        )
        weights = pack(new_weights, values.dtype)
        acc, top, below, weights, decay, i, tile = _multiply(
            acc, top, below, weights, decay, gl.to_tensor(1), tile - 1, whole, buffers, barriers, place, start, stop,
            factor, WHICH, CAUSAL, True,
        )  # fmt: skip
        acc, top, below, weights, decay, i, tile = _multiply(
            acc, top, below, weights, decay, i, tile, 0, buffers, barriers, place, start, stop, factor, WHICH, CAUSAL,
            False,
        )  # fmt: skip
        half = unpack(weights, values.dtype, P)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, A))[:, None]
        adding = warpgroup_mma(half, values.index((i - 1) % BUFFERS), acc, is_async=True)
        acc, half = warpgroup_mma_wait(0, deps=[adding, half])
    if not DIVIDED:
        inverse = gl.where(top > -1e29, 1.0 / below, 0.0)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, A))[:, None]
        _store(out, acc, begin, new, OUT_TOKEN, OUT_HEAD, WHICH, HEADS)
    elif start < length:  # a part that causality hides adds nothing, but is read
        columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, A))
        parts, valid = _parts(new, splits, HEADS, MOST_NEW, gl.SliceLayout(1, A))
        gl.store(partial + (parts * (2 * HALF))[:, None] + (WHICH * HALF + columns)[None, :], acc, mask=valid[:, None])
        if WHICH == 0:
            places, there = _parts(new, splits, HEADS, MOST_NEW, gl.SliceLayout(1, S))
            gl.store(statistics + places * 2, top, mask=there)
            gl.store(statistics + places * 2 + 1, below, mask=there)
