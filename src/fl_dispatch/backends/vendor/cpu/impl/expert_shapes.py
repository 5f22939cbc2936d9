"""Checks of the shapes of a call of experts, which compiled kernels do not check."""

from __future__ import annotations

import torch
from torch import Tensor


def mismatch(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gated: bool,
    expert_map: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    out: Tensor | None,
) -> str:
    """Return why these shapes do not fit together, or an empty string; ``gated``: whether experts have a gate."""
    if hidden_states.dim() != 2 or w13.dim() != 3 or w2.dim() != 3:
        return f"hidden_states, w13 and w2 have {hidden_states.dim()}, {w13.dim()} and {w2.dim()} dimensions"
    tokens, hidden = hidden_states.shape
    experts, _, inner = w2.shape
    rows = 2 * inner if gated else inner
    shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "w13": (w13, (experts, rows, hidden)),
        "w2": (w2, (experts, hidden, inner)),
        "w13_bias": (w13_bias, (experts, rows)),
        "w2_bias": (w2_bias, (experts, hidden)),
        "out": (out, (tokens, hidden)),
        "topk_weights": (topk_weights, topk_ids.shape),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            return f"{name} is {tuple(tensor.shape)}, not {shape}"
    if topk_ids.dim() != 2 or topk_ids.shape[0] != tokens or not topk_ids.shape[1]:
        return f"topk_ids is {tuple(topk_ids.shape)}, with {tokens} tokens"
    numbers = {"topk_ids": topk_ids, "topk_weights": topk_weights, "expert_map": expert_map}
    for name, tensor in numbers.items():
        if tensor is not None and not tensor.is_cpu:
            return f"{name} is on {tensor.device}, not on the CPU"
    if topk_ids.dtype not in (torch.int32, torch.int64):
        return f"topk_ids is {topk_ids.dtype}, not torch.int32 or torch.int64"
    if expert_map is not None and expert_map.dim() != 1:
        return f"expert_map has {expert_map.dim()} dimensions"
    return ""
