"""Kernels of the gated delta rule (Yang et al., arXiv 2406.06464 and 2412.06464).

Chunks are rows of the *batch*, wherever sequences begin. Rows of different sequences do not interact, so a chunk's
matrices are block diagonal, and the grid does not depend on lengths.

``_prepare`` does the part of a chunk that does not depend on other chunks. With the decays ``d`` since a sequence's
first row in the chunk, unit keys ``k`` and queries ``q``, and ``L[i, j] = beta[i] (k[i] k[j]) exp(d[i] - d[j])`` below
the diagonal, it makes two matrices. ``(1 + L)^-1 diag(beta)`` turns the differences between values and the state's
predictions into corrections, and ``(q[i] k[j]) exp(d[i] - d[j])`` turns corrections into outputs.

``_advance`` takes the chunks of one sequence in order and keeps some columns of one head's state in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sequence_search import sequence_of

LARGEST = tl.constexpr(4.0)
"""Bound on products of unit keys. A larger one comes from an infinity or NaN and must not reach other sequences."""
STRAIGHT = tl.constexpr(20.0)
"""PyTorch's softplus is linear above this value."""
INDICES = ["slots", "starts", "has_state"]
"""Tensors with any alignment: for the prompts of a batch they are the tail of a longer tensor."""


@triton.jit
def _softplus(x):
    return tl.where(x > STRAIGHT, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _over_length(x, LEAST: tl.constexpr):
    """Return one over the length of each row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + LEAST)


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr, DOUBLINGS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of one plus a strictly lower triangle, by blocks on the diagonal that double in size.

    If ``A`` and ``D`` are inverses of two neighbours, and ``B`` is what lies below the first and beside the second,
    then ``-D B A`` lies there in the inverse of both together. Unlike powers of the triangle, which may become large
    where keys are alike, each block is as large as a part of the result.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row >> 1 == column >> 1, lower, 0.0)
    for level in tl.static_range(1, DOUBLINGS):
        pair = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        beside = tl.where(pair, lower, 0.0)
        inverse -= tl.dot(inverse, tl.dot(beside, inverse, input_precision=PRECISION), input_precision=PRECISION)
    return inverse


@triton.jit(
    do_not_specialize=["requests", "steps", "rows", "A_ROW", "B_ROW"],
    do_not_specialize_on_alignment=["a", "b", *INDICES],
)
def _prepare(
    query,
    key,
    a,
    b,
    a_log,
    dt_bias,
    starts,
    corrections,
    outputs,
    decays,
    query_lengths,
    key_lengths,
    out,
    requests,
    steps,
    rows,
    A_ROW,
    B_ROW,
    QUERY_ROW,
    QUERY_HEAD,
    QUERY_DIM,
    KEY_ROW,
    KEY_HEAD,
    KEY_DIM,
    A_HEAD,
    B_HEAD,
    SCALE,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    LEAST: tl.constexpr,
    CHUNK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: heads, chunks. Rows of the results are padded to whole chunks.

    Writes ``corrections`` and ``outputs`` ``[rows, heads, CHUNK]``, ``decays`` ``[rows, heads]``, the reciprocals of
    both lengths, ``[rows, key_heads]``, and zeros to rows of ``out`` that no sequence covers.
    """
    head = tl.program_id(0)
    group: tl.constexpr = HEADS // KEY_HEADS
    key_head = head // group
    place = tl.arange(0, CHUNK)
    row = tl.program_id(1) * CHUNK + place
    _, start, covered = sequence_of(row, starts, requests, steps)
    start = tl.where(covered, start, -1)
    column = tl.arange(0, BLOCK_V)
    bare = ((row < rows) & (covered == 0))[:, None] & (column < DIM_V)[None, :]
    row = row.to(tl.int64)
    at = (row[:, None] * HEADS + head) * DIM_V + column[None, :]
    tl.store(out + at, tl.zeros([CHUNK, BLOCK_V], out.dtype.element_ty), mask=bare)

    step = tl.load(a + row * A_ROW + head * A_HEAD, mask=covered, other=0.0).to(tl.float32)
    step = _softplus(step + tl.load(dt_bias + head).to(tl.float32))
    step *= -tl.exp(tl.load(a_log + head).to(tl.float32))
    beta = tl.sigmoid(tl.load(b + row * B_ROW + head * B_HEAD, mask=covered, other=0.0).to(tl.float32))
    seen = (start[:, None] == start[None, :]) & covered[:, None] & (place[:, None] >= place[None, :])
    decay = tl.sum(tl.where(seen, step[None, :], 0.0), axis=1)
    since = tl.exp(tl.where(seen, decay[:, None] - decay[None, :], 0.0))
    tl.store(decays + row * HEADS + head, decay)

    dim = tl.arange(0, BLOCK)
    inside = covered[:, None] & (dim < DIM)[None, :]
    k = tl.load(key + row[:, None] * KEY_ROW + key_head * KEY_HEAD + dim[None, :] * KEY_DIM, mask=inside, other=0.0)
    k_length, k = _over_length(k, LEAST), k.to(OPERAND)
    since *= k_length[None, :]
    turned = tl.trans(k)
    lower = tl.dot(k, turned, input_precision=PRECISION) * (beta * k_length)[:, None] * since
    lower = tl.where(seen & (place[:, None] > place[None, :]) & (tl.abs(lower) < LARGEST), lower, 0.0)

    at = query + row[:, None] * QUERY_ROW + key_head * QUERY_HEAD + dim[None, :] * QUERY_DIM
    q = tl.load(at, mask=inside, other=0.0)
    q_length = _over_length(q, LEAST)
    among = tl.dot(q.to(OPERAND), turned, input_precision=PRECISION) * (q_length * SCALE)[:, None] * since
    target = (row[:, None] * HEADS + head) * CHUNK + place[None, :]
    tl.store(outputs + target, tl.where(seen, among, 0.0).to(outputs.dtype.element_ty))
    if head % group == 0:
        tl.store(query_lengths + row * KEY_HEADS + key_head, q_length)
        tl.store(key_lengths + row * KEY_HEADS + key_head, k_length)

    inverse = _inverse(lower, CHUNK, DOUBLINGS, PRECISION) * beta[None, :]
    tl.store(corrections + target, tl.where(seen, inverse, 0.0).to(corrections.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _advance(
    query,
    key,
    value,
    states,
    slots,
    starts,
    has_state,
    corrections,
    outputs,
    decays,
    query_lengths,
    key_lengths,
    out,
    QUERY_ROW,
    QUERY_HEAD,
    QUERY_DIM,
    KEY_ROW,
    KEY_HEAD,
    KEY_DIM,
    VALUE_ROW,
    VALUE_HEAD,
    VALUE_DIM,
    STATE_SLOT,
    STATE_HEAD,
    STATE_KEY,
    STATE_VALUE,
    SCALE,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    HAS_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: columns of values, heads, requests. ``UNIT``: products have unit keys; else their results are scaled."""
    head, request = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts + request), tl.load(starts + request + 1)
    if begin < end:
        key_head = head // (HEADS // KEY_HEADS)
        dim = tl.arange(0, BLOCK)
        column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        mine = states + tl.load(slots + request).to(tl.int64) * STATE_SLOT + head * STATE_HEAD
        mine += dim[:, None] * STATE_KEY + column[None, :] * STATE_VALUE
        inside = (dim < DIM)[:, None] & (column < DIM_V)[None, :]
        known = inside
        if HAS_STATE:
            known = known & (tl.load(has_state + request + tl.zeros([1, 1], tl.int32)) != 0)
        state = tl.load(mine, mask=known, other=0.0).to(tl.float32)
        place = tl.arange(0, CHUNK)
        for chunk in tl.range(begin // CHUNK, (end + CHUNK - 1) // CHUNK):
            row = chunk * CHUNK + place
            covered = (row >= begin) & (row < end)
            row = row.to(tl.int64)
            given = covered[:, None] & (dim < DIM)[None, :]
            at = row[:, None] * KEY_ROW + key_head * KEY_HEAD + dim[None, :] * KEY_DIM
            k = tl.load(key + at, mask=given, other=0.0)
            at = row[:, None] * QUERY_ROW + key_head * QUERY_HEAD + dim[None, :] * QUERY_DIM
            q = tl.load(query + at, mask=given, other=0.0).to(OPERAND)
            shown = covered[:, None] & (column < DIM_V)[None, :]
            at = row[:, None] * VALUE_ROW + head * VALUE_HEAD + column[None, :] * VALUE_DIM
            v = tl.load(value + at, mask=shown, other=0.0).to(tl.float32)
            at = (row[:, None] * HEADS + head) * CHUNK + place[None, :]
            correct = tl.load(corrections + at, mask=covered[:, None], other=0.0)
            attend = tl.load(outputs + at, mask=covered[:, None], other=0.0)
            decay = tl.load(decays + row * HEADS + head, mask=covered, other=0.0)
            q_length = tl.load(query_lengths + row * KEY_HEADS + key_head, mask=covered, other=0.0)
            k_length = tl.load(key_lengths + row * KEY_HEADS + key_head, mask=covered, other=0.0)
            if UNIT:
                k = k.to(tl.float32) * k_length[:, None]
                k_length = tl.full([CHUNK], 1.0, tl.float32)
            k = k.to(OPERAND)
            last = tl.minimum(end, chunk * CHUNK + CHUNK).to(tl.int64) - 1
            total = tl.load(decays + last * HEADS + head)

            first = tl.exp(decay)
            before = state.to(OPERAND)
            expected = tl.dot(k, before, input_precision=PRECISION) * (first * k_length)[:, None]
            correction = tl.dot(correct, (v - expected).to(OPERAND), input_precision=PRECISION)
            result = tl.dot(q, before, input_precision=PRECISION) * (first * q_length * SCALE)[:, None]
            result = tl.dot(attend, correction.to(OPERAND), result, input_precision=PRECISION)
            at = (row[:, None] * HEADS + head) * DIM_V + column[None, :]
            tl.store(out + at, result.to(out.dtype.element_ty), mask=shown)
            correction *= (tl.exp(total - decay) * k_length)[:, None]
            state = tl.dot(tl.trans(k), correction.to(OPERAND), state * tl.exp(total), input_precision=PRECISION)
        tl.store(mine, state.to(states.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["A_ROW", "B_ROW"], do_not_specialize_on_alignment=["a", "b", *INDICES[:1]])
def _update(
    query,
    key,
    value,
    a,
    b,
    a_log,
    dt_bias,
    states,
    slots,
    out,
    A_ROW,
    B_ROW,
    QUERY_ROW,
    QUERY_HEAD,
    QUERY_DIM,
    KEY_ROW,
    KEY_HEAD,
    KEY_DIM,
    VALUE_ROW,
    VALUE_HEAD,
    VALUE_DIM,
    A_HEAD,
    B_HEAD,
    STATE_SLOT,
    STATE_HEAD,
    STATE_KEY,
    STATE_VALUE,
    SCALE,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: columns of values, heads, requests."""
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    dim = tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    there, shown = dim < DIM, column < DIM_V
    mine = states + tl.load(slots + request).to(tl.int64) * STATE_SLOT + head * STATE_HEAD
    mine += dim[:, None] * STATE_KEY + column[None, :] * STATE_VALUE
    inside = there[:, None] & shown[None, :]
    state = tl.load(mine, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(key + request * KEY_ROW + key_head * KEY_HEAD + dim * KEY_DIM, mask=there, other=0.0).to(tl.float32)
    at = request * QUERY_ROW + key_head * QUERY_HEAD + dim * QUERY_DIM
    q = tl.load(query + at, mask=there, other=0.0).to(tl.float32)
    at = request * VALUE_ROW + head * VALUE_HEAD + column * VALUE_DIM
    v = tl.load(value + at, mask=shown, other=0.0).to(tl.float32)
    step = tl.load(a + request * A_ROW + head * A_HEAD).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    beta = tl.sigmoid(tl.load(b + request * B_ROW + head * B_HEAD).to(tl.float32))
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + LEAST)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + LEAST) * SCALE
    state *= tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * _softplus(step))
    correction = beta * (v - tl.sum(state * k[:, None], axis=0))
    state += k[:, None] * correction[None, :]
    result = tl.sum(state * q[:, None], axis=0)
    tl.store(out + (request * HEADS + head) * DIM_V + column, result.to(out.dtype.element_ty), mask=shown)
    tl.store(mine, state.to(states.dtype.element_ty), mask=inside)
