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
            through = _chunk if a.dim() == 1 else _walk
            result, state = through(state, tokens, step, a.to(wide), b[rows].to(wide), c[rows].to(wide))
            out[rows] = _with_token(result, tokens, d).to(out.dtype)
        states[slot] = state.to(states.dtype)
    return out


def _chunk(state: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Some tokens of one sequence at once, with one decay a head (Dao and Gu, arXiv 2405.21060, section 6).

    Args:
        state: ``[heads, head_dim, state_size]``.
        x: ``[tokens, heads, head_dim]``.
        step: ``[tokens, heads]``.
        a: ``[heads]``.
        b, c: ``[tokens, groups, state_size]``.

    Returns:
        ``[tokens, heads, head_dim]``, and the state behind the last token.
    """
    group = x.shape[1] // b.shape[1]
    x, total, b, c = (each.transpose(0, 1) for each in (x * step[:, :, None], (step * a).cumsum(0), b, c))
    since = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # [heads, i, j]: the decay from j to i
    first = total.exp()[:, :, None]  # that of the first state
    among_tokens = (c @ b.mT).repeat_interleave(group, dim=0) * since
    written, read = b.repeat_interleave(group, dim=0), c.repeat_interleave(group, dim=0)
    result = first * (read @ state.mT) + among_tokens @ x
    left = since[:, -1, :, None]  # the decay from each token to the last one
    return result.transpose(0, 1), first[:, -1:] * state + (x * left).mT @ written


def _walk(state: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`_chunk` with ``a`` of ``[heads, state_size]``, one token after the other."""
    group, results = x.shape[1] // b.shape[1], []
    for token, lasts, into, out_of in zip(x, step[:, :, None], b, c, strict=True):
        state = _next(state, token, lasts, a, into.repeat_interleave(group, dim=0))
        results.append((state * out_of.repeat_interleave(group, dim=0)[:, None, :]).sum(2))
    return torch.stack(results), state


def _next(state: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A state ``[..., heads, head_dim, state_size]`` behind one more token.

    Args:
        state: the one before it.
        x: ``[..., heads, head_dim]``.
        step: ``[..., heads, 1]``.
        a: ``[heads, 1]``, or ``[heads, state_size]``.
        b: ``[..., heads, state_size]``.
    """
    return (step * a).exp()[..., None, :] * state + (x * step)[..., None] * b[..., None, :]


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
    decays = a.to(wide).view(len(a), -1)
    state = _next(states[slots].to(wide), tokens, step[:, :, None], decays, written)
    states[slots] = state.to(states.dtype)
    return _with_token((state @ read[..., None]).squeeze(3), tokens, d).to(x.dtype)


def _step(dt: Tensor, dt_bias: Tensor | None, wide: torch.dtype) -> Tensor:
    """How long each token lasts, ``[tokens, heads]``."""
    dt = dt.to(wide)
    return functional.softplus(dt if dt_bias is None else dt + dt_bias.to(wide))


def _with_token(read: Tensor, x: Tensor, d: Tensor | None) -> Tensor:
    """``[tokens, heads, head_dim]``: what a state gives, and the part of the token that passes it by."""
    return read if d is None else read + d.to(x.dtype)[:, None] * x
