"""Operators with bit-for-bit equal results for a row in every batch, in plain PyTorch on a CPU.

PyTorch chooses the kernel of a product by the number of rows, so each product here has :data:`ROWS` rows; zeros or
leftover values fill up the last ones. ``sigmoid`` and ``silu`` of PyTorch use another formula at the end of a thread's
share. Here they consist of exact operations and of ``exp``, ``tanh`` and ``erf``, which use one formula everywhere.
``tests/core/evidence/test_invariant.py`` checks both facts about PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fl_dispatch.ops import moe, routing

ROWS = 32
"""Rows of each product."""
INNER = 16
"""Divisor of the padded row length, because MKL sums rows with another alignment in another order."""
LONGEST_ROW = (1 << 15) - 1
"""Longest row that PyTorch sums in one piece if it is the only row."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.linear.linear`."""
    columns, inner = weight.shape
    rows, short = x.reshape(-1, x.shape[-1]), -inner % INNER
    out = x.new_empty((len(rows), columns))
    if short:
        rows, weight = functional.pad(rows, (0, short)), functional.pad(weight, (0, short))
    tile = rows.new_zeros((ROWS, rows.shape[1]))
    for first in range(0, len(rows), ROWS):
        part = rows[first : first + ROWS]
        tile[: len(part)] = part
        out[first : first + ROWS] = functional.linear(tile, weight, bias)[: len(part)]
    return out.view(*x.shape[:-1], columns)


def supports_row(x: Tensor, *_: Any) -> bool | str:
    """Whether PyTorch sums each row in one piece."""
    return x.shape[-1] <= LONGEST_ROW or f"rows of {x.shape[-1]} elements, which PyTorch may add up in parts"


# -- activations ------------------------------------------------------------------------------------------------------


def _silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return 0.5 * x * (1.0 + torch.erf(x * 0.5**0.5))
    if approximate != "tanh":
        raise ValueError(f"approximate is {approximate!r}, not 'none' or 'tanh'")
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))


def _gated(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (activation(gate) * up).to(x.dtype).contiguous()


def silu_and_mul(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
    return _gated(x, _silu)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul`."""
    return _gated(x, partial(_gelu, approximate=approximate))


# -- experts ----------------------------------------------------------------------------------------------------------


def _scores(router_logits: Tensor, scoring_func: str) -> Tensor:
    if scoring_func != "sigmoid":
        return routing.scores(router_logits, scoring_func)
    return 1.0 / (1.0 + torch.exp(-router_logits.to(torch.promote_types(router_logits.dtype, torch.float32))))


def topk_sigmoid(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_sigmoid`."""
    return routing.best(_scores(router_logits, "sigmoid"), topk, renormalize, bias)


def grouped_topk(
    router_logits: Tensor,
    topk: int,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool = False,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.grouped_topk`."""
    scores = _scores(router_logits, scoring_func)
    return routing.best_of_groups(scores, topk, num_expert_group, topk_group, renormalize, routed_scaling_factor, bias)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": partial(gelu_and_mul, approximate="tanh"),
    "silu_no_mul": _silu,
    "gelu_no_mul": _gelu,
    "gelu_tanh_no_mul": partial(_gelu, approximate="tanh"),
}


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
    """See :data:`fl_dispatch.ops.moe.fused_moe`. Sums a token's experts in the order of their numbers."""

    def product(weight: Tensor, bias: Tensor | None) -> moe.Product:
        def of(expert: int, x: Tensor) -> Tensor:
            return linear(x, weight[expert].to(x.dtype), None if bias is None else bias[expert].to(x.dtype))

        return of

    given = (topk_weights, topk_ids, activation, apply_router_weight_on_input, expert_map, out)
    products = (product(w13, w13_bias), product(w2, w2_bias))
    return moe.mixture(hidden_states, w13.shape[0], *given, *products, ACTIVATIONS)
