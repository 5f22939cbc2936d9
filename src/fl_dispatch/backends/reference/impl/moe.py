"""References of the mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from fl_dispatch.ops.moe import aligned_blocks
from fl_dispatch.ops.quantization import ROW, TENSOR

from . import activation as activations
from .quantization import quantize, scaled_linear, weight_only_linear

Product = Callable[[int, Tensor], Tensor]
"""An expert and its rows → the product, at least float32."""
ScaledLinear = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, str, int], Tensor]
"""As the operator ``scaled_linear``."""


def _local(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """The expert of each pair as numbered on this rank, flat, int64; -1 where there is none."""
    ids = topk_ids.flatten().long()
    if expert_map is None:
        return ids
    return torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], -1)


def moe_align_block_size(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.moe.moe_align_block_size`."""
    pairs, device = topk_ids.numel(), topk_ids.device
    blocks = aligned_blocks(pairs, block_size, num_experts)
    sorted_token_ids = torch.full((blocks * block_size,), pairs, dtype=torch.int32, device=device)
    local = _local(topk_ids, expert_map)
    local = torch.where(local < 0, num_experts, local)  # sorts to the end, and is dropped there
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(
        0, local, torch.ones_like(local)
    )
    used = (counts + block_size - 1) // block_size
    used[num_experts] = 0
    order = local.argsort(stable=True)
    expert = local[order]
    rank = torch.arange(pairs, device=device) - (counts.cumsum(0) - counts)[expert]
    place = ((used.cumsum(0) - used) * block_size)[expert] + rank
    kept = expert < num_experts
    sorted_token_ids[place[kept]] = order[kept].int()
    ends = used.cumsum(0)[:num_experts]
    block = torch.arange(blocks, device=device)
    expert_ids = torch.searchsorted(ends, block, right=True)
    expert_ids = torch.where(expert_ids < num_experts, expert_ids, -1).int()
    return sorted_token_ids, expert_ids, (used.sum() * block_size).int().reshape(1)


def moe_sum(x: Tensor, out: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.moe.moe_sum`."""
    total = x.to(torch.promote_types(x.dtype, torch.float32)).sum(dim=1).to(x.dtype)
    return total if out is None else out.copy_(total)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": activations.silu_and_mul,
    "gelu": activations.gelu_and_mul,
    "gelu_tanh": partial(activations.gelu_and_mul, approximate="tanh"),
    "swigluoai": partial(activations.swigluoai_and_mul, alpha=1.702, limit=7.0),
    "silu_no_mul": functional.silu,
    "gelu_no_mul": activations.gelu,
    "gelu_tanh_no_mul": partial(activations.gelu, approximate="tanh"),
    "relu2_no_mul": activations.relu2,
}


def mixture(
    hidden_states: Tensor,
    experts: int,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    expert_map: Tensor | None,
    out: Tensor | None,
    first: Product,
    second: Product,
    activations: Mapping[str, Callable[[Tensor], Tensor]] = ACTIVATIONS,
) -> Tensor:
    """The experts of each token, whose two products are given, expert by expert.

    Waits for the device once, for their loads.
    """
    if activation not in activations:
        raise NotImplementedError(f"activation '{activation}'")
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    total = torch.zeros(hidden_states.shape, dtype=wide, device=hidden_states.device)
    local = _local(topk_ids, expert_map)
    order = local.argsort(stable=True)
    loads: list[int] = torch.bincount(local + 1, minlength=experts + 1).tolist()
    weights = topk_weights.flatten().to(wide)
    for expert, pairs in enumerate(torch.split(order, loads), start=-1):
        if expert < 0 or len(pairs) == 0:
            continue
        tokens, weight = pairs // topk_ids.shape[1], weights[pairs, None]
        x = hidden_states[tokens].to(wide)
        y = second(expert, activations[activation](first(expert, x * weight if apply_router_weight_on_input else x)))
        # A token has an expert once, so no two rows of one addition meet and the order of the sum is fixed.
        total.index_add_(0, tokens, y if apply_router_weight_on_input else y * weight)
    result = total.to(hidden_states.dtype)
    return result if out is None else out.copy_(result)


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
    """See :data:`fl_dispatch.ops.moe.fused_moe`."""

    def product(weight: Tensor, bias: Tensor | None) -> Product:
        def of(expert: int, x: Tensor) -> Tensor:
            return functional.linear(x, weight[expert].to(x.dtype), None if bias is None else bias[expert].to(x.dtype))

        return of

    routing = (topk_weights, topk_ids, activation, apply_router_weight_on_input, expert_map, out)
    return mixture(hidden_states, w13.shape[0], *routing, product(w13, w13_bias), product(w2, w2_bias))


def scaled_experts(multiply: ScaledLinear) -> Callable[..., Tensor]:
    """The operator ``scaled_moe`` around a product of an expert."""

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
        """See :data:`fl_dispatch.ops.quantized_moe.scaled_moe`."""
        kind = "int8" if w13.dtype is torch.int8 else "float8_e4m3fn"  # verification widens what is not integer

        def product(weight: Tensor, scale: Tensor, bias: Tensor | None, given: Tensor | None) -> Product:
            def of(expert: int, x: Tensor) -> Tensor:
                if given is None:
                    rows = quantize(x, kind, block_size or ROW)
                else:
                    rows = quantize(x, kind, TENSOR, given[expert : expert + 1])
                added = None if bias is None else bias[expert]
                return multiply(*rows, weight[expert], scale[expert], added, "float32", block_size)

            return of

        routing = (topk_weights, topk_ids, activation, apply_router_weight_on_input, expert_map, out)
        first, second = product(w13, w13_scale, w13_bias, x13_scale), product(w2, w2_scale, w2_bias, x2_scale)
        return mixture(hidden_states, w13.shape[0], *routing, first, second)

    return scaled_moe


scaled_moe = scaled_experts(scaled_linear)


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
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantized_moe.weight_only_moe`."""

    def product(weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> Product:
        def of(expert: int, x: Tensor) -> Tensor:
            zeros, added = (None if one is None else one[expert] for one in (zero, bias))
            return weight_only_linear(x, weight[expert], scale[expert], zeros, added)

        return of

    routing = (topk_weights, topk_ids, activation, apply_router_weight_on_input, expert_map, out)
    first, second = product(w13, w13_scale, w13_zero, w13_bias), product(w2, w2_scale, w2_zero, w2_bias)
    return mixture(hidden_states, w13.shape[0], *routing, first, second)
