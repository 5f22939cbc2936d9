"""Prefill for latent attention, over keys and values of several heads. On Hopper it has a separate kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported

from .. import hopper
from ..launch import power_of_two
from .online_softmax import LOG2E, update

PREFILL_TILE = (128, 64, 8, 3)
"""Queries, keys, warps, stages, for half types."""
PREFILL_TILE_WIDE = (32, 32, 4, 2)
"""``PREFILL_TILE`` for float32."""


@triton.jit
def _attend(
    acc,
    m_i,
    l_i,
    q,
    q_rest,
    keys,
    values,
    start,
    stop,
    length,
    place,
    SCALE,
    KEY_TOKEN,
    VALUE_TOKEN,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the keys from ``start`` up to ``stop``; all queries see all of them unless ``MASKED``."""
    column = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    rest = BLOCK_D + tl.arange(0, BLOCK_REST)
    dim_v = tl.arange(0, BLOCK_DV)
    for tile in tl.range(start, stop, BLOCK_N):
        position = tile + column
        inside = position < length
        key = keys + (position.to(tl.int64) * KEY_TOKEN)[None, :]
        value = values + (position.to(tl.int64) * VALUE_TOKEN)[:, None] + dim_v[None, :]
        if MASKED:
            k = tl.load(key + dim[:, None], mask=inside[None, :] & (dim < DIM)[:, None], other=0.0)
            v = tl.load(value, mask=inside[:, None] & (dim_v < DIM_V)[None, :], other=0.0)
        else:
            k = tl.load(key + dim[:, None], mask=(dim < DIM)[:, None], other=0.0)
            v = tl.load(value, mask=(dim_v < DIM_V)[None, :], other=0.0)
        qk = tl.dot(q, k, input_precision=PRECISION)
        if DIM > BLOCK_D:
            if MASKED:
                more = tl.load(key + rest[:, None], mask=inside[None, :] & (rest < DIM)[:, None], other=0.0)
            else:
                more = tl.load(key + rest[:, None], mask=(rest < DIM)[:, None], other=0.0)
            qk = tl.dot(q_rest, more, qk, input_precision=PRECISION)
        seen = True
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (position[None, :] <= place[:, None])
        p, m_i, l_i, alpha = update(qk, m_i, l_i, SCALE * LOG2E, seen, MASKED, EMPTY_ROWS=MASKED)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_i, l_i


@triton.jit(do_not_specialize=["LSE_HEAD"])
def _prefill(
    query,
    key,
    value,
    query_starts,
    key_starts,
    out,
    lse,
    LSE_HEAD,
    QUERY_TOKEN,
    QUERY_HEAD,
    KEY_TOKEN,
    KEY_HEAD,
    VALUE_TOKEN,
    VALUE_HEAD,
    OUT_TOKEN,
    OUT_HEAD,
    SCALE,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: heads, requests, tiles of queries. The head's dimensions are cut into a power of two and the rest."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)  # the last tiles see the most keys, so they start first
    begin = tl.load(query_starts + request)
    new = tl.load(query_starts + request + 1) - begin
    first = tile * BLOCK_M
    if first < new:
        key_begin = tl.load(key_starts + request)
        length = tl.load(key_starts + request + 1) - key_begin
        token = first + tl.arange(0, BLOCK_M)
        valid = token < new
        place = length - new + token
        dim = tl.arange(0, BLOCK_D)
        rest = BLOCK_D + tl.arange(0, BLOCK_REST)
        dim_v = tl.arange(0, BLOCK_DV)
        source = query + ((begin + token).to(tl.int64) * QUERY_TOKEN + head * QUERY_HEAD)[:, None]
        q = tl.load(source + dim[None, :], mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
        q_rest = q
        if DIM > BLOCK_D:
            q_rest = tl.load(source + rest[None, :], mask=valid[:, None] & (rest < DIM)[None, :], other=0.0)
        keys = key + key_begin.to(tl.int64) * KEY_TOKEN + head * KEY_HEAD
        values = value + key_begin.to(tl.int64) * VALUE_TOKEN + head * VALUE_HEAD
        stop = length
        whole_stop = length // BLOCK_N * BLOCK_N
        if CAUSAL:
            before = length - new + first  # the position of the first query
            stop = tl.maximum(0, tl.minimum(length, before + BLOCK_M))
            whole_stop = tl.maximum(0, tl.minimum(length, before + 1)) // BLOCK_N * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
        m_i = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
        l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc, m_i, l_i = _attend(
            acc, m_i, l_i, q, q_rest, keys, values, 0, whole_stop, length, place, SCALE, KEY_TOKEN, VALUE_TOKEN,
            DIM, DIM_V, BLOCK_N, BLOCK_D, BLOCK_REST, BLOCK_DV, CAUSAL, False, PRECISION,
        )  # fmt: skip
        acc, m_i, l_i = _attend(
            acc, m_i, l_i, q, q_rest, keys, values, whole_stop, stop, length, place, SCALE, KEY_TOKEN, VALUE_TOKEN,
            DIM, DIM_V, BLOCK_N, BLOCK_D, BLOCK_REST, BLOCK_DV, CAUSAL, True, PRECISION,
        )  # fmt: skip
        some = l_i > 0.0
        result = acc / tl.where(some, l_i, 1.0)[:, None]
        total = tl.where(some, (m_i + tl.log2(tl.where(some, l_i, 1.0))) * 0.6931471805599453, float("-inf"))
        target = (begin + token).to(tl.int64) * OUT_TOKEN + head * OUT_HEAD
        inside = valid[:, None] & (dim_v < DIM_V)[None, :]
        tl.store(out + target[:, None] + dim_v[None, :], result.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + head.to(tl.int64) * LSE_HEAD + begin + token, total, mask=valid)


_launch = Launcher(_prefill)


def check_arguments(tensors: tuple[Tensor, ...], out: Tensor | None, scale: float) -> None:
    """Decline arguments that the kernels of latent attention do not cover."""
    if tensors[0].dtype is torch.float64 or scale <= 0:
        raise NotSupported("float64" if scale > 0 else f"the scale {scale}")
    if any(tensor.stride(-1) != 1 for tensor in tensors) or (out is not None and out.stride(2) != 1):
        raise NotSupported("the elements of a head or of a row do not lie side by side")


def mla_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    max_query_len: int,
    max_key_len: int,
    scale: float,
    out: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.mla.mla_prefill`. Declines float64, and heads with strided elements."""
    check_arguments((query, key, value), out, scale)
    tokens, heads, dim = query.shape
    dim_v = value.shape[2]
    if out is None:
        out = query.new_empty((tokens, heads, dim_v))
    lse = query.new_full((heads, tokens), float("-inf"), dtype=torch.float32)  # also for rows that no request covers
    requests = query_start_loc.shape[0] - 1
    if not requests or not tokens or not max_query_len:
        return out, lse
    if key.shape[1] == heads and hopper.fits_in_a_row(query, key, value, out):
        hopper.attend(query, key, value, query_start_loc, key_start_loc, scale, out, lse, causal=causal)
        return out, lse
    wide = query.dtype is torch.float32
    block_m, block_n, warps, stages = PREFILL_TILE_WIDE if wide else PREFILL_TILE
    block_d = max(16, power_of_two(dim + 1) // 2)  # the largest power of two that dim holds
    _launch(
        (heads, requests, -(-max_query_len // block_m)),
        (query, key, value, query_start_loc, key_start_loc, out, lse),
        (
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            out.stride(0), out.stride(1), scale, dim, dim_v, causal, block_m, block_n, block_d,
            max(16, power_of_two(max(1, dim - block_d))), max(16, power_of_two(dim_v)), "ieee" if wide else "tf32",
        ),
        sizes=(lse.stride(0),),
        warps=warps,
        stages=stages,
    )  # fmt: skip
    return out, lse
