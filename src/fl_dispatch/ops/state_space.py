"""Selective state spaces of Mamba and Mamba 2: a fixed-size state per request instead of keys and values.

As in :mod:`.recurrent`, an operator for prompts takes ragged sequences, and one for single tokens one row per request.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .declaration import SEVERAL_ROUNDINGS, Work, bytes_of, decode, prefill, same
from .inputs import shapes, state_space
from .recurrent import first_state, sequences
from .slots import TOLERANCES, stateful, states_bytes


def _work(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, state_indices: Tensor) -> Work:
    moved = 2 * bytes_of(x) + bytes_of(dt, a, b, c) + states_bytes(states, len(state_indices))
    return Work(moved, 5 * x.shape[0] * states.shape[1:].numel())


CHUNK = 64
"""Tokens of a sequence that are processed at a time."""


@stateful(
    fake=same,
    samples=state_space.scan_samples,
    probes=state_space.scan_probes,
    shapes=shapes.scans,
    aliases=("mamba_chunk_scan_combined", "mamba_chunk_scan_combined_varlen"),
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=prefill,
    work=_work,
    waits=True,
)
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
    """A selective state space over ragged sequences (Gu and Dao, arXiv 2312.00752, section 3).

    The step of a token sets how much a head's state ``S`` decays and how much of the token enters it::

        step = softplus(dt + dt_bias)
        S = exp(step * a) * S + step * x^T b
        out = S c + d * x

    Head ``h`` reads group ``h // (heads // groups)``. Mamba 2 has one decay a head (Dao and Gu, arXiv 2405.21060,
    section 2). In Mamba each channel is a head, ``head_dim`` is 1, and each number of its state has a decay.

    Args:
        x: ``[tokens, heads, head_dim]``, floating point, any strides.
        dt: ``[tokens, heads]``, floating point, any strides: the step, before its bias and the softplus.
        a: ``[heads]``, floating point, negative; or ``[heads, state_size]``, one for each column of a head's state.
        b: ``[tokens, groups, state_size]``, dtype of ``x``, any strides: input projection of the state.
        c: shape and dtype of ``b``, any strides: output projection of the state.
        d: ``[heads]``, floating point: factor of the token that bypasses the state, or ``None`` for zero.
        dt_bias: ``[heads]``, floating point, or ``None``.
        states: ``[slots, heads, head_dim, state_size]``, floating point, a view in any strides. States of sequences
            with tokens are overwritten.
        state_indices: ``[requests]``, int32: the slot of each sequence. A slot shared by several ends with the state of
            any.
        query_start_loc: ``[requests + 1]``, int32: first row of each sequence, and the end of the last one.
        has_state: ``[requests]``, bool: whether the slot holds a state already; ``None`` if all do. Without a state
            ``S`` begins as zero, whatever the slot holds, NaN included.

    Returns:
        ``[tokens, heads, head_dim]``, dtype of ``x``. Rows that no sequence covers are unspecified.
    """
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
    """Process some tokens of one sequence at once, with one decay per head (Dao and Gu, arXiv 2405.21060, section 6).

    Args:
        state: ``[heads, head_dim, state_size]``.
        x: ``[tokens, heads, head_dim]``.
        step: ``[tokens, heads]``.
        a: ``[heads]``.
        b, c: ``[tokens, groups, state_size]``.

    Returns:
        ``[tokens, heads, head_dim]``, and the state after the last token.
    """
    group = x.shape[1] // b.shape[1]
    x, total, b, c = (each.transpose(0, 1) for each in (x * step[:, :, None], (step * a).cumsum(0), b, c))
    since = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # [heads, i, j]: the decay from j to i
    first = total.exp()[:, :, None]  # the decay of the first state
    among_tokens = (c @ b.mT).repeat_interleave(group, dim=0) * since
    written, read = b.repeat_interleave(group, dim=0), c.repeat_interleave(group, dim=0)
    result = first * (read @ state.mT) + among_tokens @ x
    left = since[:, -1, :, None]  # the decay from each token to the last one
    return result.transpose(0, 1), first[:, -1:] * state + (x * left).mT @ written


def _walk(state: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Process tokens as :func:`_chunk` does with ``a`` of ``[heads, state_size]``, one token after the other."""
    group, results = x.shape[1] // b.shape[1], []
    for token, lasts, into, out_of in zip(x, step[:, :, None], b, c, strict=True):
        state = _next(state, token, lasts, a, into.repeat_interleave(group, dim=0))
        results.append((state * out_of.repeat_interleave(group, dim=0)[:, None, :]).sum(2))
    return torch.stack(results), state


def _next(state: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a state ``[..., heads, head_dim, state_size]`` after one more token.

    Args:
        state: the state before the token.
        x: ``[..., heads, head_dim]``.
        step: ``[..., heads, 1]``.
        a: ``[heads, 1]``, or ``[heads, state_size]``.
        b: ``[..., heads, state_size]``.
    """
    return (step * a).exp()[..., None, :] * state + (x * step)[..., None] * b[..., None, :]


@stateful(
    fake=same,
    samples=state_space.update_samples,
    probes=state_space.update_probes,
    shapes=shapes.state_updates,
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=decode,
    work=_work,
)
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
    """``selective_scan`` for one more token of each sequence.

    Args:
        x: ``[requests, heads, head_dim]``, floating point, any strides.
        dt: ``[requests, heads]``, floating point, any strides: the step, before its bias and the softplus.
        a: ``[heads]``, floating point, negative; or ``[heads, state_size]``, one for each column of a head's state.
        b: ``[requests, groups, state_size]``, dtype of ``x``, any strides: input projection of the state.
        c: shape and dtype of ``b``, any strides: output projection of the state.
        d: ``[heads]``, floating point: factor of the token that bypasses the state, or ``None`` for zero.
        dt_bias: ``[heads]``, floating point, or ``None``.
        states: ``[slots, heads, head_dim, state_size]``, floating point, a view in any strides. States of the requests
            are overwritten.
        state_indices: ``[requests]``, int32: the slot of each request. A slot shared by several ends with the state of
            any.

    Returns:
        ``[requests, heads, head_dim]``, dtype of ``x``.
    """
    slots, group, wide = state_indices.long(), x.shape[1] // b.shape[1], torch.promote_types(x.dtype, torch.float32)
    tokens, step = x.to(wide), _step(dt, dt_bias, wide)
    written, read = (tensor.to(wide).repeat_interleave(group, dim=1) for tensor in (b, c))
    decays = a.to(wide).view(len(a), -1)
    state = _next(states[slots].to(wide), tokens, step[:, :, None], decays, written)
    states[slots] = state.to(states.dtype)
    return _with_token((state @ read[..., None]).squeeze(3), tokens, d).to(x.dtype)


def _step(dt: Tensor, dt_bias: Tensor | None, wide: torch.dtype) -> Tensor:
    """Return the step of each token, ``[tokens, heads]``."""
    dt = dt.to(wide)
    return functional.softplus(dt if dt_bias is None else dt + dt_bias.to(wide))


def _with_token(read: Tensor, x: Tensor, d: Tensor | None) -> Tensor:
    """Return ``[tokens, heads, head_dim]``: a state's output plus the token's part that bypasses the state."""
    return read if d is None else read + d.to(x.dtype)[:, None] * x
