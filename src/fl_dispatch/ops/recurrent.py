"""Layers with a fixed-size state per request instead of keys and values: short convolution, gated delta rule.

As hosts divide a batch, an operator for prompts takes ragged sequences, and one for single tokens one row per request;
:mod:`.slots` explains states.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from .declaration import SEVERAL_ROUNDINGS, Work, bytes_of, decode, prefill, same
from .inputs import recurrent, shapes
from .slots import TOLERANCES, stateful, states_bytes

LEAST_LENGTH = 1e-6
"""Added to the squared length of a query or key."""


# -- short convolution ------------------------------------------------------------------------------------------------


def _conv_work(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, state_indices: Tensor) -> Work:
    moved = 2 * bytes_of(x) + bytes_of(weight, bias) + states_bytes(states, len(state_indices))
    return Work(moved, 2 * x.shape[0] * weight.numel())


CHUNK = 64
"""Tokens of a sequence that the delta rule processes at a time."""


@stateful(
    fake=same,
    samples=recurrent.conv_samples,
    probes=recurrent.conv_probes,
    shapes=shapes.convolutions,
    aliases=("causal_conv1d_fn",),
    workload=prefill,
    work=_conv_work,
    waits=True,
)
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
    """A short convolution of each channel over the tokens of ragged sequences (Gu and Dao, arXiv 2312.00752, 3.4).

    ``y[t] = activation(bias + sum(weight[:, j] * x[t - width + 1 + j] for j in range(width)))``. The inputs before the
    first token of a sequence are its state.

    Args:
        x: ``[tokens, channels]``, floating point, any strides.
        weight: ``[channels, width]``, dtype of ``x``.
        bias: ``[channels]``, dtype of ``x``, or ``None``.
        states: ``[slots, channels, width - 1]``, floating point, a view in any strides: the last inputs of a sequence,
            the latest one last. States of sequences with tokens are overwritten.
        state_indices: ``[requests]``, int32: the slot of each sequence. A slot shared by several ends with the state of
            any.
        query_start_loc: ``[requests + 1]``, int32: first row of each sequence in ``x``, and the end of the last one.
        has_state: ``[requests]``, bool: whether the slot holds a state already; ``None`` if all do. Without a state the
            inputs before the first token are zeros, whatever the slot holds, NaN included.
        activation: ``"silu"``, or ``"none"``.

    Returns:
        ``[tokens, channels]``, dtype of ``x``. Rows that no sequence covers are unspecified.
    """
    out = x.new_zeros(x.shape)
    for request, begin, end in sequences(query_start_loc):
        slot = state_indices[request]
        before = first_state(states, slot, has_state, request)
        inputs = torch.cat((before.to(x.dtype), x[begin:end].t()), dim=1)
        out[begin:end] = _convolved(inputs[None], weight, bias, activation)[0].t()
        states[slot] = inputs[:, inputs.shape[1] - before.shape[1] :].to(states.dtype)
    return out


@stateful(
    fake=same,
    samples=recurrent.conv_update_samples,
    probes=recurrent.conv_update_probes,
    shapes=shapes.convolution_updates,
    workload=decode,
    work=_conv_work,
)
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
    activation: str = "silu",
) -> Tensor:
    """``causal_conv1d`` for one more token of each sequence.

    Args:
        x: ``[requests, channels]``, floating point, any strides.
        weight: ``[channels, width]``, dtype of ``x``.
        bias: ``[channels]``, dtype of ``x``, or ``None``.
        states: ``[slots, channels, width - 1]``, floating point, a view in any strides: the last inputs of a sequence,
            the latest one last. States of the requests are overwritten.
        state_indices: ``[requests]``, int32: the slot of each request. A slot shared by several ends with the state of
            any.
        activation: ``"silu"``, or ``"none"``.

    Returns:
        ``[requests, channels]``, dtype of ``x``.
    """
    slots = state_indices.long()
    inputs = torch.cat((states[slots].to(x.dtype), x[:, :, None]), dim=2)
    states[slots] = inputs[:, :, 1:].to(states.dtype)
    return _convolved(inputs, weight, bias, activation).squeeze(2).contiguous()


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Convolve ``inputs`` ``[requests, channels, width - 1 + tokens]`` to ``[requests, channels, tokens]``."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    bias = None if bias is None else bias.to(wide)
    y = functional.conv1d(inputs.to(wide), weight.to(wide)[:, None], bias, groups=len(weight))
    if activation not in ("silu", "none"):
        raise ValueError(f"there is no activation '{activation}' here, only silu and none")
    return (functional.silu(y) if activation == "silu" else y).to(inputs.dtype)


# -- gated delta rule -------------------------------------------------------------------------------------------------


def _delta_fake(value: Tensor) -> Tensor:
    return value.new_empty(value.shape)


def _delta_work(
    query: Tensor, key: Tensor, value: Tensor, a: Tensor, b: Tensor, states: Tensor, state_indices: Tensor
) -> Work:
    moved = bytes_of(query, key, a, b) + 2 * bytes_of(value) + states_bytes(states, len(state_indices))
    return Work(moved, 7 * value.shape[0] * states.shape[1:].numel())


@stateful(
    fake=_delta_fake,
    samples=recurrent.delta_samples,
    probes=recurrent.delta_probes,
    shapes=shapes.delta_rules,
    aliases=("chunk_gated_delta_rule",),
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=prefill,
    work=_delta_work,
    waits=True,
)
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
    """The gated delta rule over ragged sequences (Yang, Kautz and Hatamizadeh, arXiv 2412.06464).

    A head's state ``S`` decays, and is corrected by the difference between the value and its output for the key::

        S = exp(-exp(a_log) * softplus(a + dt_bias)) * S
        S = S + k^T (sigmoid(b) * (v - k S))
        out = scale * q S

    ``q`` and ``k`` are ``query`` and ``key`` divided by their length, the root of ``sum(x * x) + 1e-6``. Head ``h``
    reads key head ``h // (heads / key_heads)``.

    Args:
        query: ``[tokens, key_heads, key_dim]``, floating point, any strides.
        key: shape of ``query``, floating point, any strides.
        value: ``[tokens, heads, value_dim]``, floating point, any strides.
        a: ``[tokens, heads]``, floating point, any strides: the decay, before its bias.
        b: ``[tokens, heads]``, floating point, any strides: strength of the correction, before the sigmoid.
        a_log: ``[heads]``, floating point.
        dt_bias: ``[heads]``, floating point.
        states: ``[slots, heads, key_dim, value_dim]``, floating point, a view in any strides. States of sequences with
            tokens are overwritten.
        state_indices: ``[requests]``, int32: the slot of each sequence. A slot shared by several ends with the state of
            any.
        query_start_loc: ``[requests + 1]``, int32: first row of each sequence, and the end of the last one.
        has_state: ``[requests]``, bool: whether the slot holds a state already; ``None`` if all do. Without a state
            ``S`` begins as zero, whatever the slot holds, NaN included.
        scale: factor of the queries.

    Returns:
        ``[tokens, heads, value_dim]``, dtype of ``value``. Rows that no sequence covers are unspecified.
    """
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
    """Process some tokens of one sequence at once (Yang et al., arXiv 2412.06464, section 3.3).

    The corrections ``u`` depend on those of earlier tokens: ``u[i] = beta[i] * (v[i] - k[i] S[i])``, and ``S[i]`` is
    the decayed first state plus the sum of ``k[j]^T u[j]``, decayed since ``j``. This is a triangular system.

    Args:
        state: ``[heads, key_dim, value_dim]``.
        query, key: ``[heads, tokens, key_dim]``.
        value: ``[heads, tokens, value_dim]``.
        log_decay, beta: ``[heads, tokens]``.

    Returns:
        ``[heads, tokens, value_dim]``, and the state after the last token.
    """
    total = log_decay.cumsum(1)
    since = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # [heads, i, j]: the decay from j to i
    first = total.exp()[:, :, None]  # the decay of the first state
    among_keys = key @ key.mT * since * beta[:, :, None]
    known = beta[:, :, None] * (value - first * (key @ state))
    corrections = torch.linalg.solve_triangular(among_keys, known, upper=False, unitriangular=True)
    result = first * (query @ state) + (query @ key.mT * since) @ corrections
    left = since[:, -1, :, None]  # the decay from each token to the last one
    return result, first[:, -1:] * state + (key * left).mT @ corrections


@stateful(
    fake=_delta_fake,
    samples=recurrent.delta_update_samples,
    probes=recurrent.delta_update_probes,
    shapes=shapes.delta_updates,
    aliases=("fused_recurrent_gated_delta_rule", "fused_sigmoid_gating_delta_rule_update"),
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=decode,
    work=_delta_work,
)
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
    """``gated_delta_rule`` for one more token of each sequence.

    Args:
        query: ``[requests, key_heads, key_dim]``, floating point, any strides.
        key: shape of ``query``, floating point, any strides.
        value: ``[requests, heads, value_dim]``, floating point, any strides.
        a: ``[requests, heads]``, floating point, any strides: the decay, before its bias.
        b: ``[requests, heads]``, floating point, any strides: strength of the correction, before the sigmoid.
        a_log: ``[heads]``, floating point.
        dt_bias: ``[heads]``, floating point.
        states: ``[slots, heads, key_dim, value_dim]``, floating point, a view in any strides. States of the requests
            are overwritten.
        state_indices: ``[requests]``, int32: the slot of each request. A slot shared by several ends with the state of
            any.
        scale: factor of the queries.

    Returns:
        ``[requests, heads, value_dim]``, dtype of ``value``.
    """
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
    """Return number, first row and end of each sequence that has rows."""
    bounds = enumerate(pairwise(query_start_loc.tolist()))
    return [(request, begin, end) for request, (begin, end) in bounds if begin < end]


def first_state(states: Tensor, slot: Tensor, has_state: Tensor | None, request: int) -> Tensor:
    """Return the initial state of a sequence."""
    return states[slot] if has_state is None or has_state[request] else torch.zeros_like(states[slot])


def _gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay and the strength of the correction, ``[tokens, heads]``."""
    log_decay = -a_log.to(wide).exp() * functional.softplus(a.to(wide) + dt_bias.to(wide))
    return log_decay, b.to(wide).sigmoid()


def _unit(x: Tensor, heads: int, wide: torch.dtype) -> Tensor:
    """Return rows of length one, for every head of the values."""
    x = x.to(wide)
    x = x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + LEAST_LENGTH)
    return x.repeat_interleave(heads // x.shape[1], dim=1)
