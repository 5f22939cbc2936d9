"""Selective state spaces by vLLM's kernels: Triton kernels, imported in the first call, and a compiled one.

vLLM's Triton kernel for prompts takes a batch's chunks, which the operator does not receive. The device computes the
largest possible number of chunks, with empty ones at the end, so nothing waits for the lengths.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl_dispatch.types import Traits

from .limits import problem

OPERATORS = "vllm.model_executor.layers.mamba.ops"
NOBODY = -1
"""Slot number of no request."""
CHUNK = 256
"""Tokens of a chunk, as in models with such layers."""
TRAITS = Traits(chunk=CHUNK)
LARGEST_STATE = 256
"""Most columns of a state that the kernels take."""


@functools.cache
def _kernel(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(f"{OPERATORS}.{module}"), name)
    return found


def _problem(**tensors: Tensor | None) -> str:
    """Return why the kernels cannot take one of these tensors, or an empty string."""
    given = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    return next(filter(None, (problem(name, tensor, contiguous=False) for name, tensor in given)), "")


def _unlike(x: Tensor, **tensors: Tensor) -> str:
    """Return why some tensors do not have the dtype of ``x``, or an empty string."""
    return next(filter(None, (problem(name, tensor, x, contiguous=False) for name, tensor in tensors.items())), "")


def supports_selective_state_update(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, dt_bias: Tensor | None, states: Tensor
) -> bool | str:
    """Check for ``d``, a bias, and any dtype except float64."""
    if why := _problem(x=x, dt=dt, a=a, b=b, c=c, d=d, dt_bias=dt_bias, states=states):
        return why
    if d is None or dt_bias is None:
        return f"the kernel needs {'d' if d is None else 'dt_bias'}"
    return True if x.numel() else "there are no tokens"


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """See :data:`fl_dispatch.ops.state_space.selective_state_update`."""
    # A dimension of one element may have any stride, and Triton would compile a kernel for each.
    out, slots = x.new_empty(x.shape), state_indices.contiguous().as_strided((len(x), 1), (1, 1))
    _, heads, head_dim = x.shape
    if head_dim == 1 and b.shape[1] == 1:  # adjacent channels become the rows of one head
        x, into, states = x.transpose(1, 2), out.transpose(1, 2), states.transpose(1, 2)
        rates = (a if a.dim() == 2 else a[:, None].expand(heads, states.shape[3]))[None]
        dt, d, dt_bias = dt[:, None], d[None], dt_bias[None]
    else:
        into, rates = out, a[:, None, None] if a.dim() == 1 else a[:, None]
        rates = rates.expand(heads, head_dim, states.shape[3])
        dt = dt[:, :, None].expand(x.shape)
        d, dt_bias = (one[:, None].expand(heads, head_dim) for one in (d, dt_bias))
    _kernel("mamba_ssm", "selective_state_update")(
        states,
        x,
        dt,
        rates,
        b,
        c,
        d,
        dt_bias,
        dt_softplus=True,
        state_batch_indices=slots,
        dst_state_batch_indices=slots,
        null_block_id=NOBODY,
        out=into,
    )
    return out


def supports_scan_of_heads(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
) -> bool | str:
    """Check for half types and one decay a head."""
    if why := _problem(x=x, dt=dt, a=a, b=b, c=c, d=d, dt_bias=dt_bias, states=states) or _unlike(x, b=b, c=c):
        return why
    if a.dim() != 1:
        return "each column of a state has a decay"
    if x.dtype is torch.float32:
        return "the kernel rounds float32 to tf32"
    if states.shape[3] > LARGEST_STATE:
        return f"a state of {states.shape[3]} columns, more than {LARGEST_STATE}"
    return True if x.numel() and len(state_indices) else "there are no tokens"


def scan_of_heads(
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
    """See :data:`fl_dispatch.ops.state_space.selective_scan`."""
    out, slots = x.new_zeros(x.shape), state_indices.long()
    before = states[slots]
    begun = before if has_state is None else torch.where(has_state[:, None, None, None], before, 0)
    bounds, last, sequence = chunks(query_start_loc, x.shape[0])
    after = _kernel("ssd_combined", "mamba_chunk_scan_combined_varlen")(
        x,
        dt,
        a,
        b,
        c,
        chunk_size=CHUNK,
        cu_seqlens=query_start_loc,
        cu_chunk_seqlens=bounds,
        last_chunk_indices=last,
        seq_idx=sequence,
        out=out,
        D=d,
        dt_bias=dt_bias,
        initial_states=begun,
        dt_softplus=True,
        state_dtype=states.dtype,
    )
    used = (query_start_loc.diff() > 0)[:, None, None, None]
    states[slots] = torch.where(used, after, before)
    return out


def chunks(query_start_loc: Tensor, tokens: int, chunk: int = CHUNK) -> tuple[Tensor, Tensor, Tensor]:
    """Divide a batch into chunks, each with tokens of one sequence.

    Args:
        query_start_loc: ``[requests + 1]``, int32.
        tokens: rows of the batch.
        chunk: most tokens of a chunk.

    Returns:
        ``[chunks + 1]``: each chunk's first token, and the end of the last chunk; ``[requests]``: each sequence's last
        chunk (an earlier sequence's if it has no tokens); ``[chunks]``: each chunk's sequence. All int32.
    """
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    needed = (ends - starts + chunk - 1) // chunk
    up_to = needed.cumsum(0)
    number = torch.arange(len(starts) + tokens // chunk, device=starts.device)
    sequence = torch.searchsorted(up_to, number, right=True).clamp_(max=len(starts) - 1)
    first = starts[sequence] + (number - (up_to - needed)[sequence]) * chunk
    bounds = torch.cat((torch.minimum(first, ends[sequence]), ends[-1:]))
    return bounds.int(), (up_to - 1).int(), sequence.int()


def supports_scan_of_columns(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
) -> bool | str:
    """Check for channels with a decay for each column of their state."""
    if why := _problem(x=x, a=a, d=d, dt_bias=dt_bias, states=states) or _unlike(x, dt=dt, b=b, c=c):
        return why
    if a.dim() != 2 or x.shape[2] != 1:
        return "a head has more than one channel, or its state one decay"
    if states.dtype not in (x.dtype, torch.float32):
        return f"states are {states.dtype}, not {x.dtype} or float32"
    if states.shape[3] > LARGEST_STATE:
        return f"a state of {states.shape[3]} columns, more than {LARGEST_STATE}"
    return True if x.numel() and len(state_indices) else "there are no tokens"


def scan_of_columns(
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
    """See :data:`fl_dispatch.ops.state_space.selective_scan`. The kernel takes transposed tensors, channels first."""
    known = torch.ones_like(state_indices, dtype=torch.bool) if has_state is None else has_state
    out = dt.t().clone(memory_format=torch.contiguous_format)  # holds the step sizes, then the results
    into, out_of = (one.permute(1, 2, 0).contiguous() for one in (b, c))
    d, dt_bias = (None if one is None else one.float().contiguous() for one in (d, dt_bias))
    tokens, rates = x.squeeze(2).t().contiguous(), a.float().contiguous()
    heads = (tokens, out, rates, into, out_of, d, None, dt_bias, True)
    batch = (query_start_loc, state_indices.contiguous(), known, states.squeeze(2), NOBODY, 1024)
    torch.ops._C.selective_scan_fwd(*heads, *batch, None, None, None, None, None)
    return out.t().contiguous()[:, :, None]
