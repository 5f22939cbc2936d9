"""Mixtures of experts in this project's C++, for machines without the wheel's kernel and for calls that it declines.

``experts.cpp`` reads weights in their stored form and rounds once on every processor.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from fl_dispatch import cpp, native

from .expert_shapes import mismatch
from .native_calls import function, structure
from .own_attention import problem

SOURCE = Path(__file__).with_name("experts.cpp")
ACTIVATIONS = (
    "silu", "gelu", "gelu_tanh", "swigluoai", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul",
)  # fmt: skip
"""Activations in the order of ``Activation`` in ``experts.cpp``."""
PLAIN = 4
"""Index of the first activation without a gate."""
MANY = 32
"""Most rows of an expert, on average, for which this is faster than a product of matrices."""


_Call = structure(
    "x w13 w2 bias13 bias2 weights ids map out",
    "tokens choices experts numbered hidden rows inner activation on_input threads",
)
"""``Call`` of ``experts.cpp``."""


def why_unavailable() -> str:
    """Return why the function is unavailable, or an empty string."""
    return cpp.why_not(SOURCE)


def supports_fused_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> bool | str:
    """Check for few rows for each expert, in contiguous tensors of one dtype."""
    if why := _why_not(hidden_states, w13, w2, topk_weights, topk_ids, activation, expert_map, w13_bias, w2_bias, out):
        return why
    if topk_ids.numel() > MANY * (w13 if expert_map is None else expert_map).shape[0]:  # experts of all ranks
        return f"more than {MANY} rows an expert, which a product of matrices is faster for"
    return True


def _why_not(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_map: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    out: Tensor | None,
) -> str:
    """Return why the function cannot take these tensors, or an empty string."""
    if activation not in ACTIVATIONS:
        return f"activation '{activation}' is not one of {', '.join(ACTIVATIONS)}"
    tensors = {"hidden_states": hidden_states, "w13": w13, "w2": w2}
    given = {"w13_bias": w13_bias, "w2_bias": w2_bias, "out": out}
    tensors |= {name: tensor for name, tensor in given.items() if tensor is not None}
    if why := problem(**tensors):
        return why
    gated, biases = ACTIVATIONS.index(activation) < PLAIN, (w13_bias, w2_bias)
    if why := mismatch(hidden_states, w13, w2, topk_weights, topk_ids, gated, expert_map, *biases, out):
        return why
    if not all(tensor.is_contiguous() for tensor in tensors.values()):
        return "the elements of a tensor lie apart"
    return ""


def fused_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.moe.fused_moe`.

    Raises:
        IndexError: a choice names an expert that does not exist. Nothing was written.
    """
    native.require(
        _why_not(hidden_states, w13, w2, topk_weights, topk_ids, activation, expert_map, w13_bias, w2_bias, out)
    )
    if out is None:
        out = torch.empty_like(hidden_states)
    weights, ids = topk_weights.float().contiguous(), _narrow(topk_ids)
    numbers = None if expert_map is None else _narrow(expert_map)
    tensors = (hidden_states, w13, w2, w13_bias, w2_bias, weights, ids, numbers)
    call = _Call(
        *native.addresses(tensors, (out,)),
        *ids.shape, w13.shape[0], 0 if numbers is None else numbers.shape[0], *w2.shape[1:2], w13.shape[1], w2.shape[2],
        ACTIVATIONS.index(activation), apply_router_weight_on_input, torch.get_num_threads(),
    )  # fmt: skip
    if function(SOURCE, "fused_moe")(ctypes.byref(call), hidden_states.dtype is torch.bfloat16):
        raise IndexError(f"a choice names none of {len(w13)} experts")
    return out


def _narrow(numbers: Tensor) -> Tensor:
    """Convert to 32 bits; numbers out of range stay invalid expert numbers."""
    fits = numbers.dtype is torch.int32
    return (numbers if fits else numbers.clamp(-1, torch.iinfo(torch.int32).max).int()).contiguous()
