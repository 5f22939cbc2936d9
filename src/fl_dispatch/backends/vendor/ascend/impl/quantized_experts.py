"""Mixtures of experts with quantized weights: int8 with int8 rows, and 4 or 8 bits with unquantized rows.

Between the two int8 products the kernels keep int32, so :data:`~fl_dispatch.ops.quantized_moe.scaled_moe` quantizes
float32 values. 4-bit numbers become the chip's int4, eight in an int32 in their stored order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .experts import ACTIVATIONS, grouped, mixture, mixture_problem
from .limits import FLOATS, HALVES, named, problem

KERNEL = "npu_grouped_matmul"
SWIGLU = "npu_dequant_swiglu_quant"
INNER_MULTIPLE = 64
LARGEST_INNER = 10496
"""Most elements of a row between the products, for :data:`SWIGLU`."""
IN_A_WORD = 8
"""Numbers of 4 bits in an int32."""


def supports_scaled_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_ids: Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    x13_scale: Tensor | None,
    x2_scale: Tensor | None,
    block_size: int,
) -> bool | str:
    """Check for int8 with a scale for each row and column, and for ``silu`` between the products."""
    if why := problem(KERNEL, "hidden_states", hidden_states, HALVES):
        return why
    for name, tensor, dtypes in (
        ("w13", w13, (torch.int8,)),
        ("w2", w2, (torch.int8,)),
        ("w13_scale", w13_scale, FLOATS[:1]),
        ("w2_scale", w2_scale, FLOATS[:1]),
    ):
        if why := problem(KERNEL, name, tensor, dtypes):
            return why
    if block_size:
        return f"there are blocks of {block_size}; {KERNEL} takes a scale for each row and column"
    if x13_scale is not None or x2_scale is not None:
        return f"scales of rows are given; {SWIGLU} finds one for each row"
    if activation != "silu":
        return f"activation '{activation}' is not silu, which {SWIGLU} computes"
    inner = w2.shape[2]
    if inner % INNER_MULTIPLE or inner > LARGEST_INNER:
        return f"an expert has {inner} elements; {SWIGLU} takes multiples of {INNER_MULTIPLE} up to {LARGEST_INNER}"
    return mixture_problem(w13, w2, topk_ids, apply_router_weight_on_input, w13_bias, w2_bias) or True


def scaled_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    x13_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    block_size: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantized_moe.scaled_moe`. For a bfloat16 result the last
    scales are rounded to bfloat16, as the kernel requires."""
    import torch_npu

    dtype = hidden_states.dtype
    last = w2_scale.flatten(1).to(dtype if dtype is torch.bfloat16 else torch.float32)

    def products(rows: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
        inner, scales = torch_npu.npu_dequant_swiglu_quant(
            grouped(rows, w13, counts, output_dtype=torch.int32),
            weight_scale=w13_scale.flatten(1).contiguous(),
            activation_scale=scales[:, None],
            group_index=counts,
            activate_left=True,
            quant_mode=1,  # one scale for each row
        )
        return grouped(inner, w2, counts, scale=[last], per_token_scale=[scales], output_dtype=dtype)

    routing = (topk_weights, topk_ids, apply_router_weight_on_input, expert_map)
    return mixture(hidden_states, w13.shape[0], *routing, out, products, quantized=True)


def supports_weight_only_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_ids: Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    w13_zero: Tensor | None,
    w2_zero: Tensor | None,
    rounding: str,
) -> bool | str:
    """Check for 8 bits with column scales, or 4 bits with column scales or even groups without zero points."""
    if rounding:
        return f"rows are rounded to {rounding}; {KERNEL} gives a half type to the second rounding, which changes it"
    if why := problem(KERNEL, "hidden_states", hidden_states, HALVES):
        return why
    if activation not in ACTIVATIONS:
        return f"activation '{activation}' is not one of {', '.join(ACTIVATIONS)}"
    for name, weight, scale, zero in (("w13", w13, w13_scale, w13_zero), ("w2", w2, w2_scale, w2_zero)):
        if weight.dtype not in (torch.int8, torch.uint8):
            return f"{name} is {named((weight.dtype,))}; {KERNEL} takes int8 and 4 bits"
        if why := problem(KERNEL, f"{name}_scale", scale, HALVES, like=hidden_states):
            return why
        groups, packed = scale.shape[2], weight.dtype is torch.uint8
        inner = weight.shape[2] * (2 if packed else 1)
        if packed and inner % IN_A_WORD:
            return f"rows of {name} have {inner} elements; {KERNEL} takes whole words of {IN_A_WORD}"
        if groups == 1:
            continue
        if not packed:
            return f"{name} has 8 bits in groups; {KERNEL} takes a scale for each column"
        if zero is not None:
            return f"{name} has zero points in groups; {KERNEL} takes them for whole columns"
        if inner // groups % 2:
            return f"a group has {inner // groups} elements; {KERNEL} takes even numbers"
    return mixture_problem(w13, w2, topk_ids, apply_router_weight_on_input, w13_bias, w2_bias) or True


def weight_only_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w13_zero: Tensor | None = None,
    w2_zero: Tensor | None = None,
    out: Tensor | None = None,
    rounding: str = "",
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantized_moe.weight_only_moe`. Rows are never rounded here."""

    def products(rows: Tensor, _: Tensor, counts: Tensor) -> Tensor:
        inner = ACTIVATIONS[activation](_product(rows, w13, w13_scale, w13_zero, counts))
        return _product(inner, w2, w2_scale, w2_zero, counts)

    routing = (topk_weights, topk_ids, apply_router_weight_on_input, expert_map)
    return mixture(hidden_states, w13.shape[0], *routing, out, products)


def _product(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, counts: Tensor) -> Tensor:
    """Return the product of each expert's rows with its numbers; the kernel adds an offset, the negated zero point.

    Flipping the highest bit of a 4-bit number makes it an int4, which is 8 less.
    """
    offset = torch.zeros_like(scale) if zero is None else zero.to(scale.dtype).neg()
    if weight.dtype is torch.uint8:
        weight = weight.contiguous().bitwise_xor(0x88).view(torch.int32)
        if zero is not None:
            offset = offset + 8

    def placed(values: Tensor) -> list[Tensor]:
        return [values.flatten(1) if values.shape[2] == 1 else values.transpose(1, 2).contiguous()]

    return grouped(x, weight, counts, antiquant_scale=placed(scale), antiquant_offset=placed(offset))
