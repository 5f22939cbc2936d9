"""References of layers with a state for each request."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from fl_dispatch.ops.recurrent import LEAST_LENGTH

CHUNK = 64
"""Tokens of a sequence that the delta rule takes at a time."""


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
    """See :data:`fl_dispatch.ops.recurrent.causal_conv1d`. Waits for the device, to read the lengths."""
    out = x.new_zeros(x.shape)
    for request, begin, end in sequences(query_start_loc):
        slot = state_indices[request]
        before = first_state(states, slot, has_state, request)
        inputs = torch.cat((before.to(x.dtype), x[begin:end].t()), dim=1)
        out[begin:end] = _convolved(inputs[None], weight, bias, activation)[0].t()
        states[slot] = inputs[:, inputs.shape[1] - before.shape[1] :].to(states.dtype)
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
    slots = state_indices.long()
    inputs = torch.cat((states[slots].to(x.dtype), x[:, :, None]), dim=2)
    states[slots] = inputs[:, :, 1:].to(states.dtype)
    return _convolved(inputs, weight, bias, activation).squeeze(2).contiguous()


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``inputs`` ``[requests, channels, width - 1 + tokens]`` → ``[requests, channels, tokens]``."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    bias = None if bias is None else bias.to(wide)
    y = functional.conv1d(inputs.to(wide), weight.to(wide)[:, None], bias, groups=len(weight))
    if activation not in ("silu", "none"):
        raise ValueError(f"there is no activation '{activation}' here, only silu and none")
    return (functional.silu(y) if activation == "silu" else y).to(inputs.dtype)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    has_state: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """See :data:`fl_dispatch.ops.recurrent.gated_delta_rule`. Waits for the device, to read the lengths."""
    out, heads = value.new_zeros(value.shape), value.shape[1]
    for request, begin, end in sequences(query_start_loc):
        slot = state_indices[request]
        wide = torch.promote_types(value.dtype, torch.float32)
        state = first_state(states, slot, has_state, request).to(wide)
        for first in range(begin, end, CHUNK):
            rows = slice(first, min(first + CHUNK, end))
            log_decay, beta = _gates(a[rows], b[rows], a_log, dt_bias, wide)
            keys, queries = _unit(key[rows], heads, wide), _unit(query[rows], heads, wide) * scale
            by_token = queries, keys, value[rows].to(wide), log_decay, beta
            result, state = _chunk(state, *(tensor.transpose(0, 1) for tensor in by_token))
            out[rows] = result.transpose(0, 1).to(out.dtype)
        states[slot] = state.to(states.dtype)
    return out


def _chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Some tokens of one sequence at once (Yang et al., arXiv 2412.06464, section 3.3).

    The corrections ``u`` depend on those of earlier tokens: ``u[i] = beta[i] * (v[i] - k[i] S[i])``, and ``S[i]`` is
    the decayed first state and the sum of ``k[j]^T u[j]``, decayed since ``j``. That is a triangular system.

    Args:
        state: ``[heads, key_dim, value_dim]``.
        query, key: ``[heads, tokens, key_dim]``.
        value: ``[heads, tokens, value_dim]``.
        log_decay, beta: ``[heads, tokens]``.

    Returns:
        ``[heads, tokens, value_dim]``, and the state behind the last token.
    """
    total = log_decay.cumsum(1)
    since = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # [heads, i, j]: the decay from j to i
    first = total.exp()[:, :, None]  # that of the first state
    among_keys = key @ key.mT * since * beta[:, :, None]
    known = beta[:, :, None] * (value - first * (key @ state))
    corrections = torch.linalg.solve_triangular(among_keys, known, upper=False, unitriangular=True)
    result = first * (query @ state) + (query @ key.mT * since) @ corrections
    left = since[:, -1, :, None]  # the decay from each token to the last one
    return result, first[:, -1:] * state + (key * left).mT @ corrections


def gated_delta_rule_update(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_indices: Tensor,
    scale: float = 1.0,
) -> Tensor:
    """See :data:`fl_dispatch.ops.recurrent.gated_delta_rule_update`."""
    slots, heads, wide = state_indices.long(), value.shape[1], torch.promote_types(value.dtype, torch.float32)
    log_decay, beta = _gates(a, b, a_log, dt_bias, wide)
    keys, queries = _unit(key, heads, wide), _unit(query, heads, wide) * scale
    state = states[slots].to(wide) * log_decay.exp()[:, :, None, None]
    known = torch.einsum("rhk,rhkv->rhv", keys, state)
    correction = beta[:, :, None] * (value.to(wide) - known)
    state = state + keys[..., None] * correction[:, :, None, :]
    states[slots] = state.to(states.dtype)
    return torch.einsum("rhk,rhkv->rhv", queries, state).to(value.dtype)


def sequences(query_start_loc: Tensor) -> list[tuple[int, int, int]]:
    """Number, first row and end of each sequence that has rows."""
    bounds = enumerate(pairwise(query_start_loc.tolist()))
    return [(request, begin, end) for request, (begin, end) in bounds if begin < end]


def first_state(states: Tensor, slot: Tensor, has_state: Tensor | None, request: int) -> Tensor:
    """The state that a sequence begins with."""
    return states[slot] if has_state is None or has_state[request] else torch.zeros_like(states[slot])


def _gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The logarithm of the decay, and how much of a difference is corrected, ``[tokens, heads]``."""
    log_decay = -a_log.to(wide).exp() * functional.softplus(a.to(wide) + dt_bias.to(wide))
    return log_decay, b.to(wide).sigmoid()


def _unit(x: Tensor, heads: int, wide: torch.dtype) -> Tensor:
    """Rows of length one, for every head of the values."""
    x = x.to(wide)
    x = x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + LEAST_LENGTH)
    return x.repeat_interleave(heads // x.shape[1], dim=1)
