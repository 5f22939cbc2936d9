"""Mixtures of experts: two grouped matrix products and a sum.

(token, choice) pairs are sorted by expert into blocks, and a program multiplies the rows of a block with a tile of that
expert's weights. The first product loads the rows of ``gate`` and ``up`` alternately, so one thread holds both values
of an element and the activation needs no extra memory traffic. It writes in sorted order, in which the second product
reads. A few pairs are not sorted: each is a separate block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.moe import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS

from ..launch import power_of_two
from .alignment import moe_align_block_size
from .fused_moe_kernels import _down, _sum, _up

SUM_BLOCK = 1024
"""Columns that a program sums."""
SUM_BLOCK_WIDE = 512
"""``SUM_BLOCK`` for float32."""
FEW = 4
"""Fewest experts for each (token, choice) pair with which pairs are not sorted."""


class Tile(NamedTuple):
    """Tile of a product: rows of weights, length of a step, warps, stages, adjacent blocks that share weights."""

    columns: int
    depth: int
    warps: int
    stages: int
    together: int = 1


class Plan(NamedTuple):
    """Rows of a block, and the tiles of both products."""

    rows: int
    up: Tile
    down: Tile


class Plans(NamedTuple):
    """Plans for up to some pairs for each expert, and the plan for more pairs."""

    few: tuple[tuple[int, Plan], ...]
    many: Plan

    def choose(self, tokens: int, topk: int, experts: int) -> Plan:
        """Return the plan for ``tokens`` tokens, rounded up to the next power of two."""
        pairs = power_of_two(tokens) * topk
        return next((plan for most, plan in self.few if pairs <= most * experts), self.many)


PLANS = Plans(
    (
        (8, Plan(16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))),
        (16, Plan(32, Tile(128, 128, 4, 3), Tile(128, 128, 4, 3))),
        (48, Plan(64, Tile(128, 64, 4, 3), Tile(128, 64, 4, 4))),
    ),
    Plan(128, Tile(256, 64, 8, 3, 8), Tile(256, 64, 8, 4, 8)),
)
WIDE_PLANS = Plans((), Plan(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)))
"""Plans for float32, because its products are exact and slow."""


class Order(NamedTuple):
    """The row at which each (token, choice) pair is multiplied.

    Args:
        tensors: choices, ``expert_map``, and the results of ``moe_align_block_size``.
        pairs: pairs of all tokens.
        blocks: blocks of rows.
        places: rows in these blocks.
        options: whether pairs are sorted, whether there is an ``expert_map``, rows of a block.
    """

    tensors: tuple[Tensor, ...]
    pairs: int
    blocks: int
    places: int
    options: tuple[bool, bool, int]


def arrange(topk_ids: Tensor, expert_map: Tensor | None, experts: int, rows: int) -> Order:
    """Sort pairs by expert into blocks of ``rows`` rows, except for few pairs.

    Args:
        topk_ids: contiguous.
        experts: number of experts on all ranks.
    """
    pairs, mapped = topk_ids.numel(), expert_map is not None
    map_ = topk_ids if expert_map is None else expert_map
    if pairs * FEW <= experts:
        return Order((topk_ids, map_, topk_ids, topk_ids, topk_ids), pairs, pairs, pairs, (False, mapped, rows))
    order = moe_align_block_size(topk_ids, rows, experts, expert_map)
    return Order((topk_ids, map_, *order), pairs, order[1].shape[0], order[0].shape[0], (True, mapped, rows))


_launch_up = Launcher(_up)
_launch_down = Launcher(_down)
_launch_sum = Launcher(_sum)


def result(like: Tensor, shape: tuple[int, int], out: Tensor | None) -> Tensor:
    """Return ``out``, or a new tensor of this shape if it is ``None``."""
    if out is None:
        return like.new_empty(shape)
    if out.stride(1) != 1:
        raise NotSupported("the elements of a row of 'out' do not lie side by side")
    return out


def moe_sum(x: Tensor, out: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.moe.moe_sum`."""
    tokens, _, hidden = x.shape
    out = result(x, (tokens, hidden), out)
    if x.stride(2) != 1:
        x = x.contiguous()
    if tokens and hidden:
        add_up(x, out, None, None)
    return out


def add_up(x: Tensor, out: Tensor, topk_ids: Tensor | None, expert_map: Tensor | None) -> None:
    """Sum ``x`` ``[tokens, choices, hidden]`` over choices; with ``topk_ids``, only choices of experts on this rank."""
    tokens, topk, hidden = x.shape
    block = SUM_BLOCK_WIDE if x.dtype is torch.float32 else SUM_BLOCK
    _launch_sum(
        (tokens * -(-hidden // block), 1, 1),
        (x, x if topk_ids is None else topk_ids, x if expert_map is None else expert_map, out),
        (
            x.stride(0),
            x.stride(1),
            out.stride(0),
            topk,
            hidden,
            topk_ids is not None,
            expert_map is not None,
            power_of_two(topk),
            block,
        ),
    )


def strides(weights: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
    """Return the strides of experts, of rows, and of experts' biases."""
    return weights.stride(0), weights.stride(1), 0 if bias is None else bias.stride(0)


def multiply(
    launch: Launcher,
    tensors: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
    columns: int,
    tile: Tile,
    stages: int,
    order: Order,
) -> None:
    """Launch a product with ``columns`` columns."""
    launch(
        (order.blocks * -(-columns // tile.columns), 1, 1),
        tensors,
        (*numbers, *order.options, tile.columns, tile.depth, tile.together),
        sizes=(order.pairs, order.blocks),
        warps=tile.warps,
        stages=stages,
    )


def mixture(plans: Plans, wide_plans: Plans) -> Callable[..., Tensor]:
    """Return the operator ``fused_moe`` with these plans, the second ones for float32."""

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
        """See :data:`fl_dispatch.ops.moe.fused_moe`. Declines float64, and weights with strided rows."""
        if activation not in GATED_ACTIVATIONS and activation not in PLAIN_ACTIVATIONS:
            raise NotSupported(f"activation '{activation}'")
        if hidden_states.dtype is torch.float64:
            raise NotSupported("float64")
        if any(weights is not None and weights.stride(-1) != 1 for weights in (w13, w2, w13_bias, w2_bias)):
            raise NotSupported("the elements of a row of the weights do not lie side by side")
        tokens, hidden = hidden_states.shape
        out = result(hidden_states, (tokens, hidden), out)
        if not tokens or not hidden:
            return out
        experts, inner = w2.shape[0], w2.shape[2]
        if not experts:
            return out.zero_()
        if hidden_states.stride(1) != 1:
            hidden_states = hidden_states.contiguous()
        topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
        topk, wide = topk_ids.shape[1], hidden_states.dtype is torch.float32
        numbered = experts if expert_map is None else expert_map.shape[0]  # the experts of all ranks
        plan = (wide_plans if wide else plans).choose(tokens, topk, numbered)
        order = arrange(topk_ids, expert_map, numbered, plan.rows)
        gated = activation in GATED_ACTIVATIONS
        inner_states = hidden_states.new_empty((order.places, inner))
        outputs = hidden_states.new_empty((order.pairs, hidden))
        routing = (topk_weights, *order.tensors)
        precision = "ieee" if wide else "tf32"  # half types ignore tf32
        activated = (activation.removesuffix("_no_mul"), gated, w13_bias is not None, apply_router_weight_on_input)
        numbers: tuple[Any, ...] = (hidden_states.stride(0), *strides(w13, w13_bias), topk, hidden, inner, *activated)
        tensors = (hidden_states, w13, w13 if w13_bias is None else w13_bias, *routing, inner_states)
        multiply(_launch_up, tensors, (*numbers, precision), w13.shape[1], plan.up, plan.up.stages, order)
        numbers = (*strides(w2, w2_bias), hidden, inner, w2_bias is not None, not apply_router_weight_on_input)
        tensors = (inner_states, w2, w2 if w2_bias is None else w2_bias, *routing, outputs)
        multiply(_launch_down, tensors, (*numbers, precision), hidden, plan.down, plan.down.stages, order)
        add_up(outputs.view(tokens, topk, hidden), out, topk_ids, expert_map)
        return out

    return fused_moe


fused_moe = mixture(PLANS, WIDE_PLANS)
