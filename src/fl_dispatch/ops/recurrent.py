"""Layers that keep a state for each request in place of all its keys and values: short convolution, gated delta rule.

An operator for prompts takes ragged sequences, one for single tokens takes one row a request, as a host divides its
batch; :mod:`.slots` says what a state is.
"""

from __future__ import annotations

from torch import Tensor

from .declaration import SEVERAL_ROUNDINGS, Work, operator
from .inputs import recurrent, shapes
from .slots import MODES, STATE, TOLERANCES, bytes_of, decode, prefill, small_state, states_bytes

LEAST_LENGTH = 1e-6
"""Added to the square of the length of a query or key."""


# -- short convolution ------------------------------------------------------------------------------------------------


def _conv_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _conv_work(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, state_indices: Tensor) -> Work:
    moved = 2 * bytes_of(x) + bytes_of(weight, bias) + states_bytes(states, len(state_indices))
    return Work(moved, 2 * x.shape[0] * weight.numel())


@operator(
    writes={"states": STATE},
    small_state=small_state(3),
    modes=MODES,
    fake=_conv_fake,
    samples=recurrent.conv_samples,
    probes=recurrent.conv_probes,
    shapes=shapes.convolutions,
    aliases=("causal_conv1d_fn",),
    workload=prefill,
    phases=True,
    work=_conv_work,
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

    ``y[t] = activation(bias + sum(weight[:, j] * x[t - width + 1 + j] for j in range(width)))``. The inputs
    before the first token of a sequence are its state.

    Args:
        x: ``[tokens, channels]``, floating point, any strides.
        weight: ``[channels, width]``, dtype of ``x``.
        bias: ``[channels]``, dtype of ``x``, or ``None``.
        states: ``[slots, channels, width - 1]``, floating point, a view in any strides: the last inputs of a sequence,
            the latest one last. Those of the sequences that have tokens are overwritten.
        state_indices: ``[requests]``, int32: the slot of each sequence. A slot that several name holds any of theirs.
        query_start_loc: ``[requests + 1]``, int32: first row of each sequence in ``x``, and the end of the last one.
        has_state: ``[requests]``, bool: whether the slot holds a state already, or ``None`` where all do. Without one
            the inputs before the first token are zeros, whatever the slot holds, NaN included.
        activation: ``"silu"``, or ``"none"``.

    Returns:
        ``[tokens, channels]``, dtype of ``x``. Rows that no sequence covers are unspecified.
    """
    raise NotImplementedError


@operator(
    writes={"states": STATE},
    small_state=small_state(3),
    modes=MODES,
    fake=_conv_fake,
    samples=recurrent.conv_update_samples,
    probes=recurrent.conv_update_probes,
    shapes=shapes.convolution_updates,
    workload=decode,
    phases=True,
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
    """``causal_conv1d`` of one more token of each sequence.

    Args:
        x: ``[requests, channels]``, floating point, any strides.
        weight: ``[channels, width]``, dtype of ``x``.
        bias: ``[channels]``, dtype of ``x``, or ``None``.
        states: ``[slots, channels, width - 1]``, floating point, a view in any strides: the last inputs of a sequence,
            the latest one last. Those of the requests are overwritten.
        state_indices: ``[requests]``, int32: the slot of each. A slot that several name holds any of theirs.
        activation: ``"silu"``, or ``"none"``.

    Returns:
        ``[requests, channels]``, dtype of ``x``.
    """
    raise NotImplementedError


# -- gated delta rule -------------------------------------------------------------------------------------------------


def _delta_fake(value: Tensor) -> Tensor:
    return value.new_empty(value.shape)


def _delta_work(
    query: Tensor, key: Tensor, value: Tensor, a: Tensor, b: Tensor, states: Tensor, state_indices: Tensor
) -> Work:
    moved = bytes_of(query, key, a, b) + 2 * bytes_of(value) + states_bytes(states, len(state_indices))
    return Work(moved, 7 * value.shape[0] * states.shape[1:].numel())


@operator(
    writes={"states": STATE},
    small_state=small_state(7),
    modes=MODES,
    fake=_delta_fake,
    samples=recurrent.delta_samples,
    probes=recurrent.delta_probes,
    shapes=shapes.delta_rules,
    aliases=("chunk_gated_delta_rule",),
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=prefill,
    phases=True,
    work=_delta_work,
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

    A head's state ``S`` decays, and is corrected by how far it is from giving the value for the key::

        S = exp(-exp(a_log) * softplus(a + dt_bias)) * S
        S = S + k^T (sigmoid(b) * (v - k S))
        out = scale * q S

    ``q`` and ``k`` are ``query`` and ``key`` divided by their length, the root of ``sum(x * x) + 1e-6``. Head ``h``
    reads key head ``h // (heads / key_heads)``.

    Args:
        query: ``[tokens, key_heads, key_dim]``, floating point, any strides.
        key: likewise.
        value: ``[tokens, heads, value_dim]``, likewise.
        a: ``[tokens, heads]``, likewise: the decay, before its bias.
        b: ``[tokens, heads]``, likewise: how much is corrected, before the sigmoid.
        a_log: ``[heads]``, floating point.
        dt_bias: ``[heads]``, floating point.
        states: ``[slots, heads, key_dim, value_dim]``, floating point, a view in any strides. Those of the sequences
            that have tokens are overwritten.
        state_indices: ``[requests]``, int32: the slot of each sequence. A slot that several name holds any of theirs.
        query_start_loc: ``[requests + 1]``, int32: first row of each sequence, and the end of the last one.
        has_state: ``[requests]``, bool: whether the slot holds a state already, or ``None`` where all do. Without one
            ``S`` begins as zero, whatever the slot holds, NaN included.
        scale: factor of the queries.

    Returns:
        ``[tokens, heads, value_dim]``, dtype of ``value``. Rows that no sequence covers are unspecified.
    """
    raise NotImplementedError


@operator(
    writes={"states": STATE},
    small_state=small_state(7),
    modes=MODES,
    fake=_delta_fake,
    samples=recurrent.delta_update_samples,
    probes=recurrent.delta_update_probes,
    shapes=shapes.delta_updates,
    aliases=("fused_recurrent_gated_delta_rule", "fused_sigmoid_gating_delta_rule_update"),
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=decode,
    phases=True,
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
    """``gated_delta_rule`` of one more token of each sequence.

    Args:
        query: ``[requests, key_heads, key_dim]``, floating point, any strides.
        key: likewise.
        value: ``[requests, heads, value_dim]``, likewise.
        a: ``[requests, heads]``, likewise: the decay, before its bias.
        b: ``[requests, heads]``, likewise: how much is corrected, before the sigmoid.
        a_log: ``[heads]``, floating point.
        dt_bias: ``[heads]``, floating point.
        states: ``[slots, heads, key_dim, value_dim]``, floating point, a view in any strides. Those of the requests are
            overwritten.
        state_indices: ``[requests]``, int32: the slot of each. A slot that several name holds any of theirs.
        scale: factor of the queries.

    Returns:
        ``[requests, heads, value_dim]``, dtype of ``value``.
    """
    raise NotImplementedError
