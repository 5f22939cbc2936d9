"""The kernels of selective state spaces: one token, chunks of a prompt by matrix products, and tokens by a scan.

A *row* is one element of a head, so a state has ``heads * head_dim`` rows and ``state_size`` columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _step(dt):
    """Return ``softplus``, accurate for small results too: ``log(1 + e)``, corrected for the rounding of ``1 + e``."""
    small = tl.exp(-tl.abs(dt))
    total = 1.0 + small
    kept = total - 1.0
    one = kept == 0.0
    log1p = tl.where(one, small, tl.log(total) * (small / tl.where(one, 1.0, kept)))
    return tl.maximum(dt, 0.0) + log1p


@triton.jit
def _after(decay, added, later_decay, later_added):
    """Compose two updates ``state -> decay * state + added``, the earlier one first."""
    return decay * later_decay, added * later_decay + later_added


@triton.jit
def _plus_product(total, exact, x, FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``total + exact @ x``; with ``FIRST``, ``total + x @ exact``.

    ``x`` is float32, and is multiplied as the sum of two half-type parts: with one part, terms that cancel would leave
    an error larger than the rounding of the result.
    """
    high = x.to(exact.dtype)
    if FIRST:
        total = tl.dot(high, exact, total, input_precision=PRECISION)
    else:
        total = tl.dot(exact, high, total, input_precision=PRECISION)
    if exact.dtype != tl.float32:
        low = (x - high.to(tl.float32)).to(exact.dtype)
        if FIRST:
            total = tl.dot(low, exact, total)
        else:
            total = tl.dot(exact, low, total)
    return total


# These tensors have another address in each batch; their alignment must not select another compiled kernel.
@triton.jit(do_not_specialize_on_alignment=["dt", "slots"])
def _token(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    states,
    slots,
    out,
    X_TOKEN,
    X_HEAD,
    X_DIM,
    DT_TOKEN,
    DT_HEAD,
    A_HEAD,
    A_COLUMN,
    B_TOKEN,
    B_GROUP,
    B_COLUMN,
    C_TOKEN,
    C_GROUP,
    C_COLUMN,
    D_HEAD,
    BIAS_HEAD,
    STATE_SLOT,
    STATE_HEAD,
    STATE_DIM,
    STATE_COLUMN,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: requests, blocks of ``ROWS`` rows. With ``ONE_GROUP`` a block's heads are of one group."""
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    real = row < HEADS * HEAD_DIM
    inside = real[:, None] & (column < COLUMNS)
    head, dim = row // HEAD_DIM, row % HEAD_DIM
    slot = tl.load(slots + request).to(tl.int64)
    place = states + slot * STATE_SLOT + (head * STATE_HEAD + dim * STATE_DIM)[:, None] + column * STATE_COLUMN
    state = tl.load(place, mask=inside, other=0.0).to(wide)
    if ONE_GROUP:
        group = tl.program_id(1) * ROWS // HEAD_DIM // GROUP
        of_group = column < COLUMNS
    else:
        group = (head // GROUP)[:, None]
        of_group = inside
    into = tl.load(b + request * B_TOKEN + group * B_GROUP + column * B_COLUMN, mask=of_group, other=0.0).to(wide)
    out_of = tl.load(c + request * C_TOKEN + group * C_GROUP + column * C_COLUMN, mask=of_group, other=0.0).to(wide)
    token = tl.load(x + request * X_TOKEN + head * X_HEAD + dim * X_DIM, mask=real, other=0.0).to(wide)
    lasts = tl.load(dt + request * DT_TOKEN + head * DT_HEAD, mask=real, other=0.0).to(wide)
    if HAS_BIAS:
        lasts += tl.load(dt_bias + head * BIAS_HEAD, mask=real, other=0.0).to(wide)
    lasts = _step(lasts)
    if BY_COLUMN:
        rate = tl.load(a + head[:, None] * A_HEAD + column * A_COLUMN, mask=inside, other=0.0).to(wide)
        decay = tl.exp(rate * lasts[:, None])
    else:
        decay = tl.exp(tl.load(a + head * A_HEAD, mask=real, other=0.0).to(wide) * lasts)[:, None]
    state = state * decay + (token * lasts)[:, None] * into
    result = tl.sum(state * out_of, axis=1)
    if HAS_D:
        result += tl.load(d + head * D_HEAD, mask=real, other=0.0).to(wide) * token
    tl.store(place, state.to(states.dtype.element_ty), mask=inside)
    tl.store(out + request * HEADS * HEAD_DIM + row, result.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["dt", "slots", "starts", "has_state"])
def _chunks(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    states,
    slots,
    starts,
    has_state,
    out,
    rows,
    X_TOKEN,
    X_HEAD,
    X_DIM,
    DT_TOKEN,
    DT_HEAD,
    A_HEAD,
    B_TOKEN,
    B_GROUP,
    B_COLUMN,
    C_TOKEN,
    C_GROUP,
    C_COLUMN,
    D_HEAD,
    BIAS_HEAD,
    STATE_SLOT,
    STATE_HEAD,
    STATE_DIM,
    STATE_COLUMN,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: heads times blocks of ``ROWS`` of their elements, requests.

    A program walks through its sequence, ``CHUNK`` tokens at a time, and holds its part of the state, transposed.
    Within a chunk tokens see each other through ``c b^T`` and the decay from one to the other, and all tokens before
    through the state (Dao and Gu, arXiv 2405.21060, section 6).
    """
    BLOCKS: tl.constexpr = (HEAD_DIM + ROWS - 1) // ROWS
    head = tl.program_id(0) // BLOCKS
    request = tl.program_id(1)
    begin = tl.load(starts + request)
    end = tl.load(starts + request + 1)
    dim = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    row = tl.arange(0, CHUNK)
    real = dim < HEAD_DIM
    if begin < end:
        column = tl.arange(0, BLOCK)
        known = column < COLUMNS
        within = known[:, None] & real[None, :]
        slot = tl.load(slots + request).to(tl.int64)
        place = states + slot * STATE_SLOT + head.to(tl.int64) * STATE_HEAD
        place = place + column[:, None] * STATE_COLUMN + dim[None, :] * STATE_DIM
        filled = COLUMNS
        if HAS_STATE:
            filled = tl.where(tl.load(has_state + request) != 0, COLUMNS, 0)
        state = tl.load(place, mask=within & (column < filled)[:, None], other=0.0).to(tl.float32)
        rate = tl.load(a + head * A_HEAD).to(tl.float32)
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(dt_bias + head * BIAS_HEAD).to(tl.float32)
        skip = 0.0
        if HAS_D:
            skip = tl.load(d + head * D_HEAD).to(tl.float32)
        x += head * X_HEAD
        dt += head * DT_HEAD
        b += head // GROUP * B_GROUP
        c += head // GROUP * C_GROUP
        for first in tl.range(begin, end, CHUNK):
            token = (first + row).to(tl.int64)
            valid = first + row < end
            here = valid[:, None] & real[None, :]
            tokens = tl.load(x + token[:, None] * X_TOKEN + dim[None, :] * X_DIM, mask=here, other=0.0)
            keys = valid[:, None] & known[None, :]
            into = tl.load(b + token[:, None] * B_TOKEN + column[None, :] * B_COLUMN, mask=keys, other=0.0)
            out_of = tl.load(c + token[:, None] * C_TOKEN + column[None, :] * C_COLUMN, mask=keys, other=0.0)
            lasts = tl.load(dt + token * DT_TOKEN, mask=valid, other=0.0).to(tl.float32)
            lasts = tl.where(valid, _step(lasts + bias), 0.0)
            total = tl.cumsum(lasts * rate, axis=0)  # the logarithm of the decay since the chunk began
            since = tl.where(row[:, None] >= row[None, :], total[:, None] - total[None, :], float("-inf"))
            seen = tl.dot(out_of, tl.trans(into), input_precision=PRECISION) * tl.exp(since) * lasts[None, :]
            size = 1.0
            if x.dtype.element_ty == tl.float16:  # a sum over all tokens may be out of its range
                size = tl.maximum(tl.max(tl.max(tl.abs(state), axis=1), axis=0) / 32768.0, 1.0)
            result = tl.zeros([CHUNK, ROWS], dtype=tl.float32)
            result = _plus_product(result, out_of, state / size, False, PRECISION) * (tl.exp(total) * size)[:, None]
            result = _plus_product(result, tokens, seen, True, PRECISION)
            if HAS_D:
                result += tokens.to(tl.float32) * skip
            target = out + (token * HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=here)
            whole = tl.min(total, axis=0)  # the last token's, because decays are at most 1
            left = tl.exp(whole - total) * lasts
            added = tokens.to(tl.float32) * left[:, None]
            state = _plus_product(state * tl.exp(whole), tl.trans(into), added, False, PRECISION)
        tl.store(place, state.to(states.dtype.element_ty), mask=within)
    if request == tl.num_programs(1) - 1:  # the rows after all sequences
        for first in tl.range(end, rows, CHUNK):
            token = (first + row).to(tl.int64)
            target = out + (token * HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
            bare = tl.zeros([CHUNK, ROWS], dtype=out.dtype.element_ty)
            tl.store(target, bare, mask=(token < rows)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["dt", "slots", "starts", "has_state"])
def _walk(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    states,
    slots,
    starts,
    has_state,
    out,
    rows,
    X_TOKEN,
    X_HEAD,
    X_DIM,
    DT_TOKEN,
    DT_HEAD,
    A_HEAD,
    A_COLUMN,
    B_TOKEN,
    B_GROUP,
    B_COLUMN,
    C_TOKEN,
    C_GROUP,
    C_COLUMN,
    D_HEAD,
    BIAS_HEAD,
    STATE_SLOT,
    STATE_HEAD,
    STATE_DIM,
    STATE_COLUMN,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: blocks of ``ROWS`` rows, requests.

    ``TOKENS`` at a time are loaded together, and each number of the state goes through them in order.
    """
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    request = tl.program_id(1)
    begin = tl.load(starts + request)
    end = tl.load(starts + request + 1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    number = tl.arange(0, TOKENS)
    real = row < HEADS * HEAD_DIM
    if begin < end:
        column = tl.arange(0, BLOCK)[None, :]
        inside = real[:, None] & (column < COLUMNS)
        head, dim = row // HEAD_DIM, row % HEAD_DIM
        slot = tl.load(slots + request).to(tl.int64)
        place = states + slot * STATE_SLOT + (head * STATE_HEAD + dim * STATE_DIM)[:, None] + column * STATE_COLUMN
        filled = COLUMNS
        if HAS_STATE:
            filled = tl.where(tl.load(has_state + request) != 0, COLUMNS, 0)
        state = tl.load(place, mask=inside & (column < filled), other=0.0).to(wide)
        rate = tl.load(a + head[:, None] * A_HEAD + column * A_COLUMN, mask=inside, other=0.0).to(wide)
        if HAS_BIAS:
            bias = tl.load(dt_bias + head * BIAS_HEAD, mask=real, other=0.0).to(wide)
        if HAS_D:
            skip = tl.load(d + head * D_HEAD, mask=real, other=0.0).to(wide)
        if ONE_GROUP:
            group = tl.zeros([1, 1], dtype=tl.int32) + tl.program_id(0) * ROWS // HEAD_DIM // GROUP
            of_group = column < COLUMNS
        else:
            group = (head // GROUP)[:, None]
            of_group = inside
        b_place = b + group * B_GROUP + column * B_COLUMN
        c_place = c + group * C_GROUP + column * C_COLUMN
        for first in tl.range(begin, end, TOKENS):
            token = (first + number).to(tl.int64)[:, None]
            valid = (first + number < end)[:, None]
            here = valid & real[None, :]
            tokens = tl.load(x + token * X_TOKEN + (head * X_HEAD + dim * X_DIM)[None, :], mask=here, other=0.0)
            lasts = tl.load(dt + token * DT_TOKEN + (head * DT_HEAD)[None, :], mask=here, other=0.0).to(wide)
            keys = valid[:, :, None] & of_group[None, :, :]
            into = tl.load(b_place[None, :, :] + (token * B_TOKEN)[:, :, None], mask=keys, other=0.0).to(wide)
            out_of = tl.load(c_place[None, :, :] + (token * C_TOKEN)[:, :, None], mask=keys, other=0.0).to(wide)
            if HAS_BIAS:
                lasts += bias[None, :]
            lasts = tl.where(valid, _step(lasts), 0.0)  # a token after the end changes nothing
            tokens = tokens.to(wide)
            decay = tl.exp(lasts[:, :, None] * rate[None, :, :])
            added = (tokens * lasts)[:, :, None] * into
            decay, added = tl.associative_scan((decay, added), 0, _after)
            passed = decay * state[None, :, :] + added
            result = tl.sum(passed * out_of, axis=2)
            if HAS_D:
                result += tokens * skip[None, :]
            tl.store(out + token * (HEADS * HEAD_DIM) + row[None, :], result.to(out.dtype.element_ty), mask=here)
            state = tl.sum(tl.where((number == TOKENS - 1)[:, None, None], passed, 0.0), axis=0)
        tl.store(place, state.to(states.dtype.element_ty), mask=inside)
    if request == tl.num_programs(1) - 1:  # the rows after all sequences
        for first in tl.range(end, rows, TOKENS):
            token = (first + number).to(tl.int64)[:, None]
            bare = tl.zeros([TOKENS, ROWS], dtype=out.dtype.element_ty)
            tl.store(out + token * (HEADS * HEAD_DIM) + row[None, :], bare, mask=(token < rows) & real[None, :])
