"""Mixtures of experts: sort rows by expert, apply two grouped products, and sum a token's rows by weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .activation import gelu_and_mul, silu_and_mul, swigluoai_and_mul
from .limits import problem

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": partial(gelu_and_mul, approximate="tanh"),
    "swigluoai": swigluoai_and_mul,
}
MOST_EXPERTS = 1024
MOST_CHOICES = 512
LARGEST_AXIS = 65535
"""Most elements along the last axis of a matrix in a grouped product."""


def supports_fused_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> bool | str:
    """Check for one dtype and at least two gated experts without biases."""
    for name, tensor in (("hidden_states", hidden_states), ("w13", w13), ("w2", w2)):
        if why := problem("npu_grouped_matmul", name, tensor, like=hidden_states):
            return why
    if activation not in ACTIVATIONS:
        return f"activation '{activation}' is not one of {', '.join(ACTIVATIONS)}"
    return mixture_problem(w13, w2, topk_ids, apply_router_weight_on_input, w13_bias, w2_bias) or True


def mixture_problem(
    w13: Tensor, w2: Tensor, topk_ids: Tensor, on_input: bool, w13_bias: Tensor | None, w2_bias: Tensor | None
) -> str:
    """Return why :func:`mixture` and :func:`grouped` cannot take experts of any dtype, or an empty string."""
    if w13_bias is not None or w2_bias is not None:
        return "there are biases; the documentation of npu_grouped_matmul has none of an expert's own"
    if not 2 <= w13.shape[0] <= MOST_EXPERTS:
        return f"{w13.shape[0]} experts are here; npu_grouped_matmul takes 2 to {MOST_EXPERTS}"
    if max(*w13.shape[1:], *w2.shape[1:]) > LARGEST_AXIS:
        return f"an axis of the weights is larger than {LARGEST_AXIS}"
    if topk_ids.shape[1] > MOST_CHOICES:
        return f"a token has {topk_ids.shape[1]} experts; npu_moe_token_unpermute takes at most {MOST_CHOICES}"
    if on_input and topk_ids.shape[1] > 1:
        return "weights on the input of more than one expert a token"
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
    """See :data:`fl_dispatch.ops.moe.fused_moe`. Does not wait for the device."""

    def products(rows: Tensor, _: Tensor, counts: Tensor) -> Tensor:
        return grouped(ACTIVATIONS[activation](grouped(rows, w13, counts)), w2, counts)

    routing = (topk_weights, topk_ids, apply_router_weight_on_input, expert_map)
    return mixture(hidden_states, w13.shape[0], *routing, out, products)


def mixture(
    hidden_states: Tensor,
    experts: int,
    topk_weights: Tensor,
    topk_ids: Tensor,
    on_input: bool,
    expert_map: Tensor | None,
    out: Tensor | None,
    products: Callable[[Tensor, Tensor, Tensor], Tensor],
    quantized: bool = False,
) -> Tensor:
    """Compute the weighted sum of the outputs of each token's experts.

    A grouped product must cover all rows. So choices without an expert on this rank are sorted after the others, the
    last expert computes them, and they count as zero.

    Args:
        hidden_states: ``[tokens, hidden]``.
        experts: number of experts on this rank.
        topk_weights: as for ``fused_moe``.
        topk_ids: as for ``fused_moe``.
        on_input: whether weights are applied to the input.
        expert_map: as for ``fused_moe``.
        out: as for ``fused_moe``.
        products: applies the experts to rows in sorted order, ``[choices, hidden]``; its other arguments are the
            scale of each row, if quantized, and the number of each expert's rows.
        quantized: whether rows are int8.
    """
    import torch_npu

    if not hidden_states.shape[0]:
        return hidden_states.new_empty(hidden_states.shape) if out is None else out
    dtype, ids = hidden_states.dtype, _local(topk_ids, expert_map, experts)
    weights = topk_weights.masked_fill(ids == experts, 0.0)
    if on_input:
        hidden_states = (hidden_states * topk_weights).to(dtype)
        weights = torch.where(ids == experts, 0.0, 1.0)
    rows, places, counts, scales = torch_npu.npu_moe_init_routing_v2(
        hidden_states.contiguous(),
        ids,
        active_num=-1,
        expert_capacity=-1,
        expert_num=experts + 1,
        drop_pad_mode=0,
        expert_tokens_num_type=1,  # return the number of rows for each expert
        expert_tokens_num_flag=True,
        quant_mode=1 if quantized else -1,
        active_expert_range=[0, experts + 1],
        row_idx_type=0,  # return the position of each choice among the sorted rows
    )
    absent = counts[experts:]
    counts = torch.cat((counts[: experts - 1], counts[experts - 1 :].sum(dim=0, keepdim=True)))
    y = products(rows, scales, counts)
    if expert_map is not None:  # rows of another rank's experts may be infinite here
        row = torch.arange(y.shape[0], device=y.device)
        y = y.masked_fill((row >= y.shape[0] - absent)[:, None], 0.0)
    result: Tensor = torch_npu.npu_moe_token_unpermute(y, places, probs=weights.to(dtype))
    return result if out is None else out.copy_(result)


def _local(topk_ids: Tensor, expert_map: Tensor | None, experts: int) -> Tensor:
    """Return each choice's expert number on this rank, int32; ``experts`` for choices without an expert here."""
    ids = topk_ids
    if expert_map is not None:
        ids = torch.where(ids >= 0, expert_map[ids.clamp(min=0).long()], -1)
    return torch.where(ids >= 0, ids, experts).to(torch.int32).contiguous()


def grouped(x: Tensor, weight: Tensor, counts: Tensor, **quantization: Any) -> Tensor:
    """Return the product of each expert's rows with its matrix ``[columns, inner]``."""
    import torch_npu

    (y,) = torch_npu.npu_grouped_matmul(
        [x], [weight.transpose(1, 2)], split_item=2, group_type=0, group_list_type=1, group_list=counts, **quantization
    )
    return y  # type: ignore[no-any-return]


def supports_moe_sum(x: Tensor) -> bool | str:
    """Check for at most 512 experts a token."""
    if x.shape[1] > MOST_CHOICES:
        return f"a token has {x.shape[1]} experts; npu_moe_token_unpermute takes at most {MOST_CHOICES}"
    return problem("npu_moe_token_unpermute", "x", x) or True


def moe_sum(x: Tensor, out: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.moe.moe_sum`. Calls the kernel with rows in order and weights of one."""
    import torch_npu

    tokens, topk, hidden = x.shape
    if not x.numel():
        return x.new_empty(tokens, hidden) if out is None else out
    order = torch.arange(tokens * topk, dtype=torch.int32, device=x.device)
    result: Tensor = torch_npu.npu_moe_token_unpermute(
        x.reshape(-1, hidden).contiguous(), order, probs=x.new_ones(tokens, topk)
    )
    return result if out is None else out.copy_(result)
