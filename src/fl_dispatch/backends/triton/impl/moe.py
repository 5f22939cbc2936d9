"""The experts of a mixture: two grouped matrix products and a sum.

Pairs of a token and a choice are sorted by expert into blocks, and a program multiplies the rows of a block with a tile
of that expert's weights. The first product loads the rows of gate and ``up`` alternately, so that both of an element
meet in one thread and the activation costs no memory. It writes in sorted order, which the second product reads as it
lies. Few pairs are not sorted: each is a block of its own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.moe import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS

from .alignment import moe_align_block_size
from .launch import Launcher, power_of_two
from .moe_kernels import _down, _sum, _up

SUM_BLOCK, SUM_BLOCK_WIDE = 1024, 512
"""Columns that a program adds up; the smaller number for float32."""
FEW = 4
"""Pairs are not sorted if there are at least ``FEW`` times as many experts."""


class Tile(NamedTuple):
    """Tile of a product: rows of weights, length of a step, warps, stages, blocks that share weights side by side."""

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


PLANS: tuple[tuple[int, Plan], ...] = (
    (8, Plan(16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))),
    (16, Plan(32, Tile(128, 128, 4, 3), Tile(128, 128, 4, 3))),
    (48, Plan(64, Tile(128, 64, 4, 3), Tile(128, 64, 4, 4))),
)
"""By pairs for each expert, up to so many."""
LARGE_PLAN = Plan(128, Tile(256, 64, 8, 3, 8), Tile(256, 64, 8, 4, 8))
WIDE_PLAN = Plan(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
"""For float32, whose products are exact and slow."""


_launch_up = Launcher(_up)
_launch_down = Launcher(_down)
_launch_sum = Launcher(_sum)


def _result(like: Tensor, shape: tuple[int, int], out: Tensor | None) -> Tensor:
    if out is None:
        return like.new_empty(shape)
    if out.stride(1) != 1:
        raise NotSupported("the elements of a row of 'out' do not lie side by side")
    return out


def moe_sum(x: Tensor, out: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.moe.moe_sum`."""
    tokens, _, hidden = x.shape
    out = _result(x, (tokens, hidden), out)
    if x.stride(2) != 1:
        x = x.contiguous()
    if tokens and hidden:
        _add_up(x, out, None, None)
    return out


def _add_up(x: Tensor, out: Tensor, topk_ids: Tensor | None, expert_map: Tensor | None) -> None:
    """The sum over ``x``'s middle dimension; with ``topk_ids`` of the choices alone that have an expert here."""
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


@functools.cache
def _plan(pairs: int, experts: int, wide: bool) -> Plan:
    """Tile sizes by average pairs per expert."""
    if wide:
        return WIDE_PLAN
    return next((plan for most, plan in PLANS if pairs <= most * experts), LARGE_PLAN)


def _strides(weights: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
    return weights.stride(0), weights.stride(1), 0 if bias is None else bias.stride(0)


def _multiply(
    launch: Launcher, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], tile: Tile, pairs: int, blocks: int
) -> None:
    """Launch one product: ``tensors`` begin with the rows and the weights."""
    wide = tensors[0].dtype is torch.float32
    launch(
        (blocks * -(-tensors[1].shape[1] // tile.columns), 1, 1),
        tensors,
        (*numbers, tile.columns, tile.depth, tile.together, "ieee" if wide else "tf32"),  # half types take no notice
        sizes=(pairs, blocks),
        warps=tile.warps,
        stages=tile.stages,
    )


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
    """See :data:`fl_dispatch.ops.moe.fused_moe`. Declines float64, and weights whose rows are strided."""
    if activation not in GATED_ACTIVATIONS and activation not in PLAIN_ACTIVATIONS:
        raise NotSupported(f"activation '{activation}'")
    if hidden_states.dtype is torch.float64:
        raise NotSupported("float64")
    if any(weights is not None and weights.stride(-1) != 1 for weights in (w13, w2, w13_bias, w2_bias)):
        raise NotSupported("the elements of a row of the weights do not lie side by side")
    tokens, hidden = hidden_states.shape
    out = _result(hidden_states, (tokens, hidden), out)
    if not tokens or not hidden:
        return out
    experts, inner = w2.shape[0], w2.shape[2]
    if not experts:
        return out.zero_()
    if hidden_states.stride(1) != 1:
        hidden_states = hidden_states.contiguous()
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    topk = topk_ids.shape[1]
    pairs = tokens * topk
    mapped = expert_map is not None
    map_ = topk_ids if expert_map is None else expert_map
    numbered = experts if expert_map is None else expert_map.shape[0]  # the pairs are for these, here or not
    plan = _plan(power_of_two(tokens) * topk, numbered, hidden_states.dtype is torch.float32)
    aligned = pairs * FEW > numbered
    if aligned:
        order = moe_align_block_size(topk_ids, plan.rows, numbered, expert_map)
        blocks, places = order[1].shape[0], order[0].shape[0]
    else:
        order = (topk_ids, topk_ids, topk_ids)
        blocks, places = pairs, pairs
    gated = activation in GATED_ACTIVATIONS
    inner_states = hidden_states.new_empty((places, inner))
    outputs = hidden_states.new_empty((pairs, hidden))
    routing = (topk_weights, topk_ids, map_, *order)
    activated = (activation.removesuffix("_no_mul"), gated, w13_bias is not None, apply_router_weight_on_input)
    numbers: tuple[Any, ...] = (hidden_states.stride(0), *_strides(w13, w13_bias), topk, hidden, inner, *activated)
    tensors = (hidden_states, w13, w13 if w13_bias is None else w13_bias, *routing, inner_states)
    _multiply(_launch_up, tensors, (*numbers, aligned, mapped, plan.rows), plan.up, pairs, blocks)
    numbers = (*_strides(w2, w2_bias), hidden, inner, w2_bias is not None, not apply_router_weight_on_input)
    tensors = (inner_states, w2, w2 if w2_bias is None else w2_bias, *routing, outputs)
    _multiply(_launch_down, tensors, (*numbers, aligned, mapped, plan.rows), plan.down, pairs, blocks)
    _add_up(outputs.view(tokens, topk, hidden), out, topk_ids, expert_map)
    return out
