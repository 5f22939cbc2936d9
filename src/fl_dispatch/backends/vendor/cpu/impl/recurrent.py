"""Layers with a state for each request, in bfloat16: a convolution of four taps, and the gated delta rule.

The kernels of the delta rule store a state as ``[key_dim, value_dim]`` and normalize keys and queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_dispatch.ops.recurrent import LEAST_LENGTH

from .. import library
from .limits import problem

WIDTH = 4
"""Taps of a convolution."""
CHANNELS = 32
"""Divisor of a convolution's number of channels."""
HEADS = (64, 128)
"""Sizes of keys and values for prompts."""
KERNELS = (
    "causal_conv1d_fwd_cpu",
    "causal_conv1d_update_cpu",
    "fused_gdn_gating_cpu",
    "chunk_gated_delta_rule_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
)
SOFTPLUS = (1.0, 20.0)
"""Slope of softplus, and the value above which it is linear, as in PyTorch."""


def why_unavailable() -> str:
    """Return why the kernels are not loaded or missing, or an empty string."""
    return library.why_unavailable() or library.why_missing(KERNELS)


def supports_causal_conv1d_update(x: Tensor, weight: Tensor, states: Tensor) -> bool | str:
    """Check for four taps and whole vectors of channels that are contiguous in the states."""
    channels, width = weight.shape
    if why := _halves(x=x, weight=weight, states=states) or _empty(x):
        return why
    if width != WIDTH or channels % CHANNELS:
        return f"{channels} channels of {width} taps are not a multiple of {CHANNELS} of {WIDTH}"
    return True if states.stride(1) == 1 else "the channels of a state lie apart"


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
    if has_state is None:
        has_state = torch.ones(len(state_indices), dtype=torch.bool)
    out: Tensor = torch.ops._C.causal_conv1d_fwd_cpu(
        x.contiguous().t(),
        weight,
        bias,
        states,
        query_start_loc,
        state_indices,
        has_state,
        activation == "silu",
        -1,  # no slot is padding
        False,
    )
    return _without_padding(out.t(), query_start_loc)


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
    activation: str = "silu",
) -> Tensor:
    """See :data:`fl_dispatch.ops.recurrent.causal_conv1d_update`."""
    out: Tensor = torch.ops._C.causal_conv1d_update_cpu(
        x.contiguous(), states, weight, bias, activation == "silu", None, state_indices, -1, False
    )
    return out


def supports_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    scale: float = 1.0,
) -> bool | str:
    """Check the limits of one token, and that keys and values have the same size."""
    if (size := key.shape[-1]) not in HEADS or value.shape[-1] != size:
        return f"keys of {size} and values of {value.shape[-1]} elements are not both {' or '.join(map(str, HEADS))}"
    return supports_gated_delta_rule_update(query, key, value, a, b, a_log, dt_bias, states, scale)


def supports_gated_delta_rule_update(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    scale: float = 1.0,
) -> bool | str:
    """Check for contiguous states in float32 or bfloat16, and for the scale that follows from the key size."""
    size, columns = key.shape[-1], value.shape[-1]
    if why := _halves(query=query, key=key, value=value, a=a, b=b, dt_bias=dt_bias) or _empty(value):
        return why
    if a_log.dtype is not torch.float32 or states.dtype not in (torch.float32, torch.bfloat16):
        return f"a_log is {a_log.dtype}, not torch.float32, or states are {states.dtype}"
    if states.stride()[1:] != (size * columns, columns, 1):
        return "the elements of a state lie apart"
    return True if abs(scale - size**-0.5) < 1e-6 else f"the scale {scale} is not the root of 1 / {size}"


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
    """See :data:`fl_dispatch.ops.recurrent.gated_delta_rule`. The kernel starts from the contents of a slot."""
    if has_state is not None:
        new = ~has_state & (query_start_loc.diff() > 0)
        states[state_indices[new].long()] = 0.0
    decay, beta = torch.ops._C.fused_gdn_gating_cpu(a_log, a.contiguous(), b.contiguous(), dt_bias)
    rows = (tensor.contiguous()[None] for tensor in (query, key, value))
    out: Tensor
    out, _ = torch.ops._C.chunk_gated_delta_rule_cpu(
        *rows, decay, beta, states, True, query_start_loc, False, True, state_indices, LEAST_LENGTH
    )
    return _without_padding(out[0], query_start_loc)


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
    rows = (tensor.contiguous()[None] for tensor in (query, key, value))
    starts = torch.arange(len(value) + 1, dtype=torch.int32)
    out: Tensor = torch.ops._C.fused_sigmoid_gating_delta_rule_update_cpu(
        a_log, dt_bias, *rows, a.contiguous(), b.contiguous(), states, state_indices, starts, True, *SOFTPLUS
    )
    return out.view(value.shape)


def _without_padding(out: Tensor, query_start_loc: Tensor) -> Tensor:
    """Zero the rows without a request, which the kernels do not write."""
    out[int(query_start_loc[-1]) :] = 0.0
    return out


def _halves(**tensors: Tensor) -> str:
    """Return why the kernels cannot take one of these tensors, or an empty string."""
    for name, tensor in tensors.items():
        if why := problem(name, tensor, contiguous=False):
            return why
        if tensor.dtype is not torch.bfloat16:
            return f"{name} is {tensor.dtype}, not torch.bfloat16"
    return ""


def _empty(tensor: Tensor) -> str:
    return "" if tensor.numel() else "there are no tokens"
