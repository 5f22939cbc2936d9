"""Selective state spaces.

The kernel for prompts takes contiguous float32 states, so the requests' states are copied there and back. The kernel
for single tokens works in the slots directly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .. import library
from .limits import problem, rounds

KERNELS = ("mamba_chunk_scan_fwd_cpu", "selective_state_update_cpu")
NOBODY = -1
"""Slot number of no request."""


def why_unavailable() -> str:
    """Return why the kernels are not loaded or missing, or an empty string."""
    return library.why_unavailable() or library.why_missing(KERNELS)


def supports_selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, dt_bias: Tensor | None, states: Tensor
) -> bool | str:
    """Check for one dtype of a token's tensors, one decay a head, and contiguous states."""
    return _why_not(x, dt, a, b, c, d, dt_bias, states) or True


def supports_selective_state_update(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, dt_bias: Tensor | None, states: Tensor
) -> bool | str:
    """Check the limits of :func:`supports_selective_scan`, and for states that the kernel rounds."""
    if not rounds(states.dtype):  # the next step reads the state, so truncation errors would accumulate
        return "the build for this processor truncates states to bfloat16"
    return _why_not(x, dt, a, b, c, d, dt_bias, states) or True


def _why_not(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
) -> str:
    """Return why neither kernel takes these tensors, or an empty string."""
    for name, tensor in {"x": x, "dt": dt, "b": b, "c": c, "d": d, "dt_bias": dt_bias}.items():
        if tensor is not None and (why := problem(name, tensor, x, contiguous=False)):
            return why
    if a.dim() != 1:
        return "each column of a state has a decay"
    if why := problem("states", states, contiguous=False):
        return why
    _, _, rows, columns = states.shape
    if states.stride()[1:] != (rows * columns, columns, 1):
        return "the elements of a state lie apart"
    return "" if x.numel() else "there are no tokens"


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
    """See :data:`fl_dispatch.ops.state_space.selective_scan`."""
    slots = state_indices.long()
    state = states[slots].to(torch.float32, memory_format=torch.contiguous_format)
    if has_state is not None:
        state[~has_state] = 0.0
    step = dt.float()
    step = functional.softplus(step if dt_bias is None else step + dt_bias.float())
    out = torch.zeros(x.shape, dtype=x.dtype)  # the kernel does not write rows without a request
    d = None if d is None else d.float()
    torch.ops._C.mamba_chunk_scan_fwd_cpu(
        out, state, x.contiguous(), step, a.float(), b.contiguous(), c.contiguous(), d, None, query_start_loc
    )
    used = query_start_loc.diff() > 0
    states[slots[used]] = state[used].to(states.dtype)
    return out


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
    _, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype)
    slots = state_indices.contiguous()[:, None]
    torch.ops._C.selective_state_update_cpu(
        states,
        x.contiguous(),
        dt[:, :, None].expand(x.shape),
        a.float()[:, None, None].expand(heads, head_dim, states.shape[3]),
        b.contiguous(),
        c.contiguous(),
        None if d is None else d[:, None].expand(heads, head_dim),
        None,
        None if dt_bias is None else dt_bias[:, None].expand(heads, head_dim),
        True,
        slots,
        slots,
        NOBODY,
        out,
        None,
        None,
    )
    return out
