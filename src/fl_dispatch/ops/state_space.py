"""Selective state spaces, as Mamba and Mamba 2 have them: a state for each request in place of all its keys and values.

As in :mod:`.recurrent` an operator for prompts takes ragged sequences, and one for single tokens one row a request.
"""

from __future__ import annotations

from torch import Tensor

from .declaration import SEVERAL_ROUNDINGS, Work, operator
from .inputs import shapes, state_space
from .slots import MODES, STATE, TOLERANCES, bytes_of, decode, prefill, small_state, states_bytes


def _fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _work(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, state_indices: Tensor) -> Work:
    moved = 2 * bytes_of(x) + bytes_of(dt, a, b, c) + states_bytes(states, len(state_indices))
    return Work(moved, 5 * x.shape[0] * states.shape[1:].numel())


@operator(
    writes={"states": STATE},
    small_state=small_state(7),
    modes=MODES,
    fake=_fake,
    samples=state_space.scan_samples,
    probes=state_space.scan_probes,
    shapes=shapes.scans,
    aliases=("mamba_chunk_scan_combined", "mamba_chunk_scan_combined_varlen"),
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=prefill,
    phases=True,
    work=_work,
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

    A head's state ``S`` decays by how long a token lasts, its step, and takes the token in as long::

        step = softplus(dt + dt_bias)
        S = exp(step * a) * S + step * x^T b
        out = S c + d * x

    Head ``h`` reads group ``h // (heads // groups)``. Mamba 2 has one decay a head (Dao and Gu, arXiv 2405.21060,
    section 2). In Mamba each channel is a head, ``head_dim`` is 1, and each number of its state has a decay.

    Args:
        x: ``[tokens, heads, head_dim]``, floating point, any strides.
        dt: ``[tokens, heads]``, likewise: the step, before its bias and the softplus.
        a: ``[heads]``, floating point, negative; or ``[heads, state_size]``, one for each column of a head's state.
        b: ``[tokens, groups, state_size]``, dtype of ``x``, any strides: what goes into the state.
        c: likewise: what is read from it.
        d: ``[heads]``, floating point: the part of a token that passes the state by, or ``None`` for nothing.
        dt_bias: ``[heads]``, floating point, or ``None``.
        states: ``[slots, heads, head_dim, state_size]``, floating point, a view in any strides. Those of the sequences
            that have tokens are overwritten.
        state_indices: ``[requests]``, int32: the slot of each sequence. A slot that several name holds any of theirs.
        query_start_loc: ``[requests + 1]``, int32: first row of each sequence, and the end of the last one.
        has_state: ``[requests]``, bool: whether the slot holds a state already, or ``None`` where all do. Without one
            ``S`` begins as zero, whatever the slot holds, NaN included.

    Returns:
        ``[tokens, heads, head_dim]``, dtype of ``x``. Rows that no sequence covers are unspecified.
    """
    raise NotImplementedError


@operator(
    writes={"states": STATE},
    small_state=small_state(7),
    modes=MODES,
    fake=_fake,
    samples=state_space.update_samples,
    probes=state_space.update_probes,
    shapes=shapes.state_updates,
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=decode,
    phases=True,
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
    """``selective_scan`` of one more token of each sequence.

    Args:
        x: ``[requests, heads, head_dim]``, floating point, any strides.
        dt: ``[requests, heads]``, likewise: the step, before its bias and the softplus.
        a: ``[heads]``, floating point, negative; or ``[heads, state_size]``, one for each column of a head's state.
        b: ``[requests, groups, state_size]``, dtype of ``x``, any strides: what goes into the state.
        c: likewise: what is read from it.
        d: ``[heads]``, floating point: the part of a token that passes the state by, or ``None`` for nothing.
        dt_bias: ``[heads]``, floating point, or ``None``.
        states: ``[slots, heads, head_dim, state_size]``, floating point, a view in any strides. Those of the requests
            are overwritten.
        state_indices: ``[requests]``, int32: the slot of each. A slot that several name holds any of theirs.

    Returns:
        ``[requests, heads, head_dim]``, dtype of ``x``.
    """
    raise NotImplementedError
