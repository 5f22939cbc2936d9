"""Short convolutions: for prompts one kernel computes every token, and a second one then stores the last inputs.

The second launch keeps a state from being overwritten before it is read, because the first and the last tokens of a
sequence are in different programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported

from ..launch import power_of_two
from .sequence_search import sequence_of, steps_of_search

ROWS = 16
"""Tokens of a program for prompts."""
CHANNELS = 256
"""Channels of a program for prompts."""
CHANNELS_OF_A_TOKEN = 256
INDICES = ["slots", "starts", "has_state"]
"""Tensors with any alignment: for the prompts of a batch they are the tail of a longer tensor."""


@triton.jit
def _activated(acc, SILU: tl.constexpr):
    return acc * tl.sigmoid(acc) if SILU else acc


@triton.jit(do_not_specialize=["requests", "steps", "rows"], do_not_specialize_on_alignment=INDICES)
def _convolve(
    x,
    weight,
    bias,
    states,
    slots,
    starts,
    has_state,
    out,
    requests,
    steps,
    rows,
    X_ROW,
    X_CHANNEL,
    WEIGHT_CHANNEL,
    WEIGHT_TAP,
    STATE_SLOT,
    STATE_CHANNEL,
    STATE_TAP,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: channels, rows. ``HAS_STATE``: not every sequence has one."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    sequence, start, covered = sequence_of(row, starts, requests, steps)
    there, inside = (channel < CHANNELS)[None, :], (row < rows)[:, None] & (channel < CHANNELS)[None, :]
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    acc = tl.zeros([ROWS, BLOCK], dtype=wide)
    if HAS_BIAS:
        acc += tl.load(bias + channel, mask=channel < CHANNELS, other=0.0).to(wide)[None, :]
    began = tl.min(tl.where(covered, row - start, WIDTH), axis=0) < WIDTH - 1
    for tap in tl.static_range(WIDTH):
        source = row - (WIDTH - 1) + tap
        own = (source >= start) & covered
        at = source.to(tl.int64)[:, None] * X_ROW + channel[None, :] * X_CHANNEL
        part = tl.load(x + at, mask=own[:, None] & there, other=0.0).to(wide)
        if began:
            before = (source < start) & covered
            if HAS_STATE:
                before = before & (tl.load(has_state + sequence, mask=before, other=0) != 0)
            slot = tl.load(slots + sequence, mask=before, other=0).to(tl.int64)
            of = (slot * STATE_SLOT + (WIDTH - 1 + source - start) * STATE_TAP)[:, None]
            kept = tl.load(states + of + channel[None, :] * STATE_CHANNEL, mask=before[:, None] & there, other=0.0)
            part += kept.to(x.dtype.element_ty).to(wide)
        factor = tl.load(weight + channel * WEIGHT_CHANNEL + tap * WEIGHT_TAP, mask=channel < CHANNELS, other=0.0)
        acc += part * factor.to(wide)[None, :]
    target = out + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(target, _activated(acc, SILU).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _keep(
    x,
    states,
    slots,
    starts,
    has_state,
    X_ROW,
    X_CHANNEL,
    STATE_SLOT,
    STATE_CHANNEL,
    STATE_TAP,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_STATE: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep the last inputs of each sequence that has tokens. Grid: channels, requests."""
    request = tl.program_id(1)
    begin, end = tl.load(starts + request), tl.load(starts + request + 1)
    if begin < end:
        channel = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
        tap = tl.arange(0, TAPS)[None, :]
        inside = (channel < CHANNELS) & (tap < WIDTH - 1)
        source = end - (WIDTH - 1) + tap
        state = states + tl.load(slots + request).to(tl.int64) * STATE_SLOT + channel * STATE_CHANNEL
        new = tl.load(x + source.to(tl.int64) * X_ROW + channel * X_CHANNEL, mask=inside & (source >= begin), other=0.0)
        before = inside & (source < begin)
        if HAS_STATE:
            before = before & (tl.load(has_state + request + tl.zeros([1, 1], tl.int32)) != 0)
        old = tl.load(state + (WIDTH - 1 + source - begin) * STATE_TAP, mask=before, other=0.0)
        kept = tl.where(source >= begin, new.to(states.dtype.element_ty), old)
        tl.debug_barrier()  # a short sequence moves inputs from place to place, perhaps to another thread's
        tl.store(state + tap * STATE_TAP, kept, mask=inside)


@triton.jit(do_not_specialize_on_alignment=INDICES[:1])
def _update(
    x,
    weight,
    bias,
    states,
    slots,
    out,
    X_ROW,
    X_CHANNEL,
    WEIGHT_CHANNEL,
    WEIGHT_TAP,
    STATE_SLOT,
    STATE_CHANNEL,
    STATE_TAP,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: channels, requests."""
    request = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    new = tl.load(x + request * X_ROW + channel * X_CHANNEL, mask=there, other=0.0)
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    last = tl.load(weight + channel * WEIGHT_CHANNEL + (WIDTH - 1) * WEIGHT_TAP, mask=there, other=0.0)
    acc = new.to(wide) * last.to(wide)
    if HAS_BIAS:
        acc += tl.load(bias + channel, mask=there, other=0.0).to(wide)
    if WIDTH > 1:
        tap = tl.arange(0, TAPS)[None, :]
        inside = there[:, None] & (tap < WIDTH - 1)
        slot = tl.load(slots + request).to(tl.int64)
        state = states + slot * STATE_SLOT + channel[:, None] * STATE_CHANNEL + tap * STATE_TAP
        old = tl.load(state, mask=inside, other=0.0)
        factor = tl.load(weight + channel[:, None] * WEIGHT_CHANNEL + tap * WEIGHT_TAP, mask=inside, other=0.0)
        acc += tl.sum(old.to(new.dtype).to(wide) * factor.to(wide), axis=1)
        tl.debug_barrier()  # each input moves one place on, perhaps to another thread's
        tl.store(state - STATE_TAP, old.to(new.dtype).to(states.dtype.element_ty), mask=inside & (tap > 0))
        newest = states + slot * STATE_SLOT + channel * STATE_CHANNEL + (WIDTH - 2) * STATE_TAP
        tl.store(newest, new.to(states.dtype.element_ty), mask=there)
    tl.store(out + request * CHANNELS + channel, _activated(acc, SILU).to(out.dtype.element_ty), mask=there)


_launch, _launch_keep, _launch_update = Launcher(_convolve), Launcher(_keep), Launcher(_update)


def _silu(activation: str) -> bool:
    if activation not in ("silu", "none"):
        raise NotSupported(f"the activation '{activation}'")
    return activation == "silu"


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    has_state: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """See :data:`fl_dispatch.ops.recurrent.causal_conv1d`."""
    (rows, channels), width = x.shape, weight.shape[1]
    out, requests = x.new_empty(x.shape), len(state_indices)
    silu, known = _silu(activation), has_state is not None
    if not rows or not channels or not requests:
        return out
    block = min(CHANNELS, power_of_two(channels))
    across = -(-channels // block)
    state_indices, query_start_loc = state_indices.contiguous(), query_start_loc.contiguous()
    who = query_start_loc if has_state is None else has_state.contiguous().view(torch.int8)
    _launch(
        (across, -(-rows // ROWS), 1),
        (x, weight, x if bias is None else bias.contiguous(), states, state_indices, query_start_loc, who, out),
        (
            *x.stride(), *weight.stride(), *states.stride(),
            channels, width, bias is not None, known, silu, ROWS, block,
        ),
        sizes=(requests, steps_of_search(requests), rows),
    )  # fmt: skip
    if width > 1:
        _launch_keep(
            (across, requests, 1),
            (x, states, state_indices, query_start_loc, who),
            (*x.stride(), *states.stride(), channels, width, known, power_of_two(width - 1), block),
        )
    return out


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
    activation: str = "silu",
) -> Tensor:
    """See :data:`fl_dispatch.ops.recurrent.causal_conv1d_update`."""
    (requests, channels), width = x.shape, weight.shape[1]
    out, silu = x.new_empty(x.shape), _silu(activation)
    if not requests or not channels:
        return out
    block = min(CHANNELS_OF_A_TOKEN, power_of_two(channels))
    _launch_update(
        (-(-channels // block), requests, 1),
        (x, weight, x if bias is None else bias.contiguous(), states, state_indices.contiguous(), out),
        (
            *x.stride(), *weight.stride(), *states.stride(),
            channels, width, bias is not None, silu, power_of_two(max(1, width - 1)), block,
        ),
    )  # fmt: skip
    return out
