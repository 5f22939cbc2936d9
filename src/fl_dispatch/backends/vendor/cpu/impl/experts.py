"""Mixtures of experts by the wheel's kernel, with weights repacked once (:mod:`fl_dispatch.weight_forms`)."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_dispatch import weight_forms
from fl_dispatch.ops import moe as declared

from .. import library
from .expert_shapes import mismatch
from .limits import problem, rounds
from .tiles import TILES

KERNELS = ("cpu_fused_moe", "prepack_moe_weight")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")
COLUMNS = 32
"""Columns that the kernel takes at a time."""
MANY = 96
"""Most rows of an expert, on average, for which the kernel is faster than PyTorch's products in float32."""
VECTORS = "vec"
"""The kernel's name of the variant for vectors; it reads weights in another order than the matrix unit's variant."""


def why_unavailable() -> str:
    """Return why the kernels are not loaded or missing, or an empty string."""
    return library.why_unavailable() or library.why_missing(KERNELS)


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
    """Check for gated local experts of whole vectors and one dtype, with router weights on their outputs."""
    if activation not in ACTIVATIONS:
        return f"activation '{activation}' is not one of {', '.join(ACTIVATIONS)}"
    if expert_map is not None or apply_router_weight_on_input:
        return "the kernel has every expert, and weighs what comes out of it"
    biases = w13_bias, w2_bias
    if why := mismatch(hidden_states, w13, w2, topk_weights, topk_ids, True, None, *biases, out):
        return why
    if hidden_states.shape[1] % COLUMNS or w2.shape[2] % COLUMNS:
        return f"sizes {hidden_states.shape[1]} and {w2.shape[2]} are not multiples of {COLUMNS}"
    if hidden_states.dtype is torch.float32 and topk_ids.numel() > MANY * len(w13):
        return f"more than {MANY} rows an expert, for which PyTorch's products in float32 are faster"
    tensors = {"w13": w13, "w2": w2, "w13_bias": w13_bias, "w2_bias": w2_bias, "out": out}
    for name, tensor in {"hidden_states": hidden_states, **tensors}.items():
        if tensor is not None and (why := problem(name, tensor, like=hidden_states)):
            return why
    if not (weight_forms.may_be(w13) and weight_forms.may_be(w2)):
        return (
            "the weights cannot be repacked, because the host did not declare them, or writes to them are not noticed"
        )
    return rounds(hidden_states.dtype) or "the build for this processor truncates results to bfloat16"


def instructions(dtype: torch.dtype) -> str:
    """Return the kernel's variant: the matrix unit multiplies bfloat16 only."""
    return TILES if dtype is torch.bfloat16 and library.has_tiles() else VECTORS


def pack(weight: Tensor, before: Tensor | None) -> Tensor:
    """Repack weights ``[experts, columns, inner]`` into the order in which the kernel reads them."""
    fits = before is not None and before.shape == weight.shape and before.dtype is weight.dtype
    packed = before if before is not None and fits else torch.empty_like(weight)
    torch.ops._C.prepack_moe_weight(weight.detach(), packed, instructions(weight.dtype))
    return packed


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
    """See :data:`fl_dispatch.ops.moe.fused_moe`. The kernel does not check expert numbers, so this function does.

    Raises:
        IndexError: a choice names an expert that does not exist. Nothing was written.
    """
    packed13, packed2 = (weight_forms.of(weight, "vendor.cpu", pack) for weight in (w13, w2))
    least, most = (int(end) for end in topk_ids.aminmax()) if topk_ids.numel() else (-1, -1)
    if most >= len(w13):
        raise IndexError(f"a choice names none of {len(w13)} experts")
    if packed13 is None or packed2 is None or least < 0:
        biases = (w13_bias, w2_bias)
        return declared.fused_moe.reference(
            hidden_states, w13, w2, topk_weights, topk_ids, activation, False, None, *biases, out
        )
    if out is None:
        out = torch.empty_like(hidden_states)
    torch.ops._C.cpu_fused_moe(
        out,
        hidden_states,
        packed13,
        packed2,
        w13_bias,
        w2_bias,
        topk_weights.float().contiguous(),
        topk_ids.int().contiguous(),
        False,
        activation,
        instructions(hidden_states.dtype),
    )
    return out
