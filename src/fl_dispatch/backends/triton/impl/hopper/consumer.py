"""The warps that multiply: each group has 64 queries, its own softmax and its own sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .schedule import BLOCK_N, STAGES, key_tiles, told
from .softmax import pack, softmax, unpack

ROWS = gl.constexpr(64)
"""Queries of a group."""


@gluon.jit
def _wait_full(barrier, number, there):
    """Wait until the buffer of tile ``number`` is full."""
    mbarrier.wait(barrier, (number // STAGES) & 1, pred=there)


@gluon.jit
def _scores(q, q_rest, k, k_rest, S: gl.constexpr, REST: gl.constexpr):
    """Start the product of queries and keys."""
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if REST > 0:
        scores = warpgroup_mma(q_rest, k_rest.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _steps(
    acc,
    top,
    below,
    weights,
    i,
    tile,
    stop,
    q,
    q_rest,
    buffers,
    barriers,
    place,
    length,
    factor,
    S: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    REST: gl.constexpr,
):
    """Tiles ``tile``, ``tile - 1`` … ``stop``, the first of which is the program's tile ``i``; its keys are there.

    ``weights`` are packed, and those of the tile before, whose values are still to be added to the sums: that product
    runs beside the softmax of this tile.
    """
    A: gl.constexpr = acc.type.layout
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    _, _, _, k_bufs, k_rest_bufs, v_bufs = buffers
    full, k_free, v_free = barriers
    while tile >= stop:
        stage = i % STAGES
        before = (i - 1) % STAGES
        half = unpack(weights, v_bufs.dtype, P)
        pending = _scores(q, q_rest, k_bufs.index(stage), k_rest_bufs.index(stage), S, REST)
        _wait_full(full.index(STAGES + before), i - 1, True)
        adding = warpgroup_mma(half, v_bufs.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[pending])
        mbarrier.arrive(k_free.index(stage))
        new, top, below, decay = softmax(scores, top, below, tile * BLOCK_N, place, length, factor, CAUSAL, MASKED)
        # This wait ends a basic block. Without it ptxas moves the softmax behind the product that it shall run beside.
        _wait_full(full.index((i + 1) % STAGES), i + 1, tile > 0)
        acc, half, new, below, decay = warpgroup_mma_wait(0, deps=[adding, half, new, below, decay])
        mbarrier.arrive(v_free.index(before))
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, A))[:, None]
        weights = pack(new, v_bufs.dtype)
        tile -= 1
        i += 1
    return acc, top, below, weights, i, tile


@gluon.jit
def _store(out, acc, begin, new, row, head, OUT_TOKEN, OUT_HEAD, DIM_V: gl.constexpr):
    """Write a group's results."""
    # As products leave them, but with 16 bytes in a row a thread: four threads swap what they have, and write 64 bytes.
    W: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]]
        if DIM_V == 128
        else [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, DIM_V],
    )
    token = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, W))
    dim = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, W))
    rows = (begin + token).to(gl.int64) * OUT_TOKEN + head.to(gl.int64) * OUT_HEAD
    target = out + rows[:, None] + dim[None, :]
    gl.store(target, gl.convert_layout(acc.to(out.dtype.element_ty), W), mask=(token < new)[:, None])


@gluon.jit
def consume(
    out,
    lse,
    buffers,
    barriers,
    OUT_TOKEN,
    OUT_HEAD,
    LSE_HEAD,
    SCALE,
    WHICH: gl.constexpr,
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
    REST: gl.constexpr,
    DIM_V: gl.constexpr,
    QUERIES: gl.constexpr,
):
    """All pieces of a program, for its queries ``64 * WHICH`` to ``64 * WHICH + 63``."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    piece_bufs, q_bufs, q_rest_bufs, k_bufs, k_rest_bufs, v_bufs = buffers
    full, k_free, v_free = barriers
    factor = SCALE * 1.4426950408889634  # takes a score to base 2
    i = 0  # tiles so far
    done = 0  # pieces so far
    mbarrier.wait(full.index(2 * STAGES), 0)
    begin, new, length, first, head = told(piece_bufs.index(0))
    while head >= 0:
        tiles, whole = key_tiles(new, length, first, CAUSAL)
        row = first + ROWS * WHICH
        q = q_bufs.index(done % QUERIES).slice(ROWS * WHICH, ROWS)
        q_rest = q
        if REST > 0:
            q_rest = q_rest_bufs.index(done % QUERIES).slice(ROWS * WHICH, ROWS)
        acc = gl.zeros([ROWS, DIM_V], gl.float32, A)
        top = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, S))
        below = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        place = length - new + row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        stage = i % STAGES
        _wait_full(full.index(stage), i, True)
        pending = _scores(q, q_rest, k_bufs.index(stage), k_rest_bufs.index(stage), S, REST)
        scores = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(k_free.index(stage))
        start = (tiles - 1) * BLOCK_N
        new_weights, top, below, _ = softmax(scores, top, below, start, place, length, factor, CAUSAL, True)
        weights = pack(new_weights, v_bufs.dtype)
        i += 1
        tile = tiles - 2
        _wait_full(full.index(i % STAGES), i, tile >= 0)
        acc, top, below, weights, i, tile = _steps(
            acc, top, below, weights, i, tile, whole, q, q_rest, buffers, barriers, place, length, factor, S, CAUSAL,
            True, REST,
        )  # fmt: skip
        acc, top, below, weights, i, tile = _steps(
            acc, top, below, weights, i, tile, 0, q, q_rest, buffers, barriers, place, length, factor, S, CAUSAL, False,
            REST,
        )  # fmt: skip
        last = (i - 1) % STAGES
        half = unpack(weights, v_bufs.dtype, P)
        _wait_full(full.index(STAGES + last), i - 1, True)
        adding = warpgroup_mma(half, v_bufs.index(last), acc, is_async=True)
        acc, half = warpgroup_mma_wait(0, deps=[adding, half])
        mbarrier.arrive(v_free.index(last))
        some = top > -1e29
        inverse = gl.where(some, 1.0 / below, 0.0)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, A))[:, None]
        _store(out, acc, begin, new, row, head, OUT_TOKEN, OUT_HEAD, DIM_V)
        if LSE:
            token = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
            total = gl.where(some, (top + gl.log2(below)) * 0.6931471805599453, float("-inf"))
            gl.store(lse + head.to(gl.int64) * LSE_HEAD + begin + token, total, mask=token < new)
        done += 1
        mbarrier.wait(full.index(2 * STAGES + done % QUERIES), (done // QUERIES) & 1)
        begin, new, length, first, head = told(piece_bufs.index(done % QUERIES))
