"""References of selective state spaces."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .recurrent import first_state, sequences

CHUNK = 64
"""Tokens of a sequence that are taken at a time."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    has_state: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.state_space.selective_scan`. Waits for the device, to read the lengths."""
    out, wide = x.new_zeros(x.shape), torch.promote_types(x.dtype, torch.float32)
    for request, begin, end in sequences(query_start_loc):
        slot = state_indices[request]
        state = first_state(states, slot, has_state, request).to(wide)
        for first in range(begin, end, CHUNK):
            rows = slice(first, min(first + CHUNK, end))
            tokens, step = x[rows].to(wide), _step(dt[rows], dt_bias, wide)
            log_decay = step * a.to(wide)
            by_token = tokens * step[:, :, None], log_decay, b[rows].to(wide), c[rows].to(wide)
            result, state = _chunk(state, *(tensor.transpose(0, 1) for tensor in by_token))
            out[rows] = _with_token(result.transpose(0, 1), tokens, d).to(out.dtype)
        states[slot] = state.to(states.dtype)
    return out


def _chunk(state: Tensor, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Some tokens of one sequence at once (Dao and Gu, arXiv 2405.21060, section 6).

    Args:
        state: ``[heads, head_dim, state_size]``.
        x: ``[heads, tokens, head_dim]``, by the step of each token.
        log_decay: ``[heads, tokens]``.
        b, c: ``[groups, tokens, state_size]``.

    Returns:
        ``[heads, tokens, head_dim]``, and the state behind the last token.
    """
    group = len(x) // len(b)
    total = log_decay.cumsum(1)
    since = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # [heads, i, j]: the decay from j to i
    first = total.exp()[:, :, None]  # that of the first state
    among_tokens = (c @ b.mT).repeat_interleave(group, dim=0) * since
    written, read = b.repeat_interleave(group, dim=0), c.repeat_interleave(group, dim=0)
    result = first * (read @ state.mT) + among_tokens @ x
    left = since[:, -1, :, None]  # the decay from each token to the last one
    return result, first[:, -1:] * state + (x * left).mT @ written


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """See :data:`fl_dispatch.ops.state_space.selective_state_update`."""
    slots, group, wide = state_indices.long(), x.shape[1] // b.shape[1], torch.promote_types(x.dtype, torch.float32)
    tokens, step = x.to(wide), _step(dt, dt_bias, wide)
    written, read = (tensor.to(wide).repeat_interleave(group, dim=1) for tensor in (b, c))
    decayed = states[slots].to(wide) * (step * a.to(wide)).exp()[:, :, None, None]
    state = decayed + (tokens * step[:, :, None])[..., None] * written[:, :, None, :]
    states[slots] = state.to(states.dtype)
    return _with_token((state @ read[..., None]).squeeze(3), tokens, d).to(x.dtype)


def _step(dt: Tensor, dt_bias: Tensor | None, wide: torch.dtype) -> Tensor:
    """How long each token lasts, ``[tokens, heads]``."""
    dt = dt.to(wide)
    return functional.softplus(dt if dt_bias is None else dt + dt_bias.to(wide))


def _with_token(read: Tensor, x: Tensor, d: Tensor | None) -> Tensor:
    """``[tokens, heads, head_dim]``: what a state gives, and the part of the token that passes it by."""
    return read if d is None else read + d.to(x.dtype)[:, None] * x
