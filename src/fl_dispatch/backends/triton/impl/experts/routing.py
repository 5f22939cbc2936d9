"""Routing: a program scores all experts for some tokens and selects the best experts one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported

from ..launch import power_of_two

MANY_TOKENS = 1024
"""Fewest tokens for which a program takes several."""
MANY = (4, 1)
"""Tokens and warps of such a program."""


@triton.jit
def _in_order(x):
    """Map floats to integers in the same order: the bits of a negative float, except its sign, are inverted."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        return tl.where(bits < 0, bits ^ 0x7FFF, bits)
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _from_order(key):
    """Invert :func:`_in_order` for float32."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits,
    bias,
    weights,
    ids,
    tokens,
    TOKEN_STRIDE,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
):
    """Select the ``TOPK`` best experts by integer keys: a warp of some chips finds the largest in one instruction.

    A tile is ``[tokens, groups, members of a group]``; without groups, one group has all experts. Without a bias,
    scores rise with logits, so keys are made of logits. The key of a logit in a half type also holds the expert's
    number, so the largest key names the best expert; for other dtypes a second search finds the expert. Scores of other
    experts are computed only if the sum of all is needed.
    """
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    BLOCK: tl.constexpr = BLOCK_GROUPS * BLOCK_MEMBERS
    SINGLE_KEY: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 16 and not BIASED and BLOCK <= 32768
    DONE: tl.constexpr = -2147483648
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    group = column // BLOCK_MEMBERS
    member = column % BLOCK_MEMBERS
    expert = group * MEMBERS + member
    known = (group < GROUPS) & (member < MEMBERS)
    source = logits + row.to(tl.int64) * TOKEN_STRIDE
    wide: tl.constexpr = tl.float64 if logits.dtype.element_ty == tl.float64 else tl.float32
    inside = (row < tokens)[:, None] & known[None, :]
    x = tl.load(source[:, None] + expert[None, :], mask=inside, other=0.0)
    top = tl.zeros([ROWS], dtype=wide)
    total = tl.full([ROWS], 1.0, dtype=wide)
    # Renormalization cancels the sum over all experts.
    SUM: tl.constexpr = not SIGMOID and (BIASED or not RENORMALIZE)
    if SUM:
        full = tl.where(known[None, :], x.to(wide), float("-inf"))
        top = tl.max(full, axis=1)
        total = tl.sum(tl.exp(full - top[:, None]), axis=1)
    if BIASED:
        if SIGMOID:
            scores = 1.0 / (1.0 + tl.exp(-x.to(wide)))
        else:
            scores = tl.exp(x.to(wide) - top[:, None]) / total[:, None]
        key = _in_order(scores + tl.load(bias + expert, mask=known, other=0.0).to(wide)[None, :])
    else:
        key = _in_order(x)
    key = tl.where(known[None, :], key, DONE)
    if TOPK_GROUP < GROUPS:
        grouped = tl.reshape(key, (ROWS, BLOCK_GROUPS, BLOCK_MEMBERS))
        best = tl.max(grouped, axis=2)
        place = tl.arange(0, BLOCK_GROUPS)[None, :]
        if BIASED:
            # A group's score is the sum of its two largest, so keys become floats again.
            order = tl.arange(0, BLOCK_MEMBERS)[None, None, :]
            first = tl.min(tl.where(grouped == best[:, :, None], order, BLOCK_MEMBERS), axis=2)
            second = tl.max(tl.where(order == first[:, :, None], DONE, grouped), axis=2)
            values = _from_order(best) + tl.where(second == DONE, 0.0, _from_order(second))
            best = _in_order(values)
        best = tl.where(place < GROUPS, best, DONE)
        open_ = tl.zeros((ROWS, BLOCK_GROUPS), dtype=tl.int32)
        for _ in tl.static_range(TOPK_GROUP):
            most = tl.max(best, axis=1)[:, None]
            chosen = place == tl.min(tl.where(best == most, place, BLOCK_GROUPS), axis=1)[:, None]
            open_ = tl.where(chosen, 1, open_)
            best = tl.where(chosen, DONE, best)
        closed = tl.broadcast_to((open_ == 0)[:, :, None], (ROWS, BLOCK_GROUPS, BLOCK_MEMBERS))
        key = tl.where(tl.reshape(closed, (ROWS, BLOCK)), DONE, key)
    if SINGLE_KEY:
        key = tl.where(key == DONE, DONE, key * 65536 + (BLOCK - 1 - column)[None, :])
    slot = tl.arange(0, BLOCK_TOPK)[None, :]
    place = tl.zeros((ROWS, BLOCK_TOPK), dtype=tl.int32)
    for k in tl.static_range(TOPK):
        most = tl.max(key, axis=1)[:, None]
        if SINGLE_KEY:
            place = tl.where(slot == k, BLOCK - 1 - (most & 0xFFFF), place)
            key = tl.where(key == most, DONE, key)
        else:
            best = tl.min(tl.where(key == most, column[None, :], BLOCK - 1), axis=1)[:, None]
            place = tl.where(slot == k, best, place)
            key = tl.where(column[None, :] == best, DONE, key)
    found_expert = place // BLOCK_MEMBERS * MEMBERS + place % BLOCK_MEMBERS
    inside = (row < tokens)[:, None] & (slot < TOPK)
    found = tl.load(source[:, None] + found_expert, mask=inside, other=0.0).to(wide)
    if SIGMOID:
        found = 1.0 / (1.0 + tl.exp(-found))
    else:
        if not SUM:
            top = tl.max(tl.where(slot < TOPK, found, float("-inf")), axis=1)
        found = tl.exp(found - top[:, None]) / total[:, None]
    if RENORMALIZE:
        chosen_sum = tl.sum(tl.where(slot < TOPK, found, 0.0), axis=1)
        found = found / (chosen_sum[:, None] + 1e-20)  # SMALLEST_SUM
    target = row.to(tl.int64)[:, None] * TOPK + slot
    tl.store(weights + target, (found * FACTOR).to(tl.float32), mask=inside)
    tl.store(ids + target, found_expert, mask=inside)


_launch = Launcher(_route)


def choose(
    router_logits: Tensor,
    topk: int,
    renormalize: bool,
    sigmoid: bool,
    bias: Tensor | None,
    groups: int = 1,
    topk_group: int = 1,
    factor: float = 1.0,
    *,
    alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return weights and numbers of the best experts; with ``alone`` each program takes one token."""
    tokens, experts = router_logits.shape
    if router_logits.stride(1) != 1:
        router_logits = router_logits.contiguous()
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    weights = router_logits.new_empty((tokens, topk), dtype=torch.float32)
    ids = router_logits.new_empty((tokens, topk), dtype=torch.int32)
    if tokens:
        rows, warps = (1, 1) if alone or tokens < MANY_TOKENS else MANY
        _launch(
            (-(-tokens // rows), 1, 1),
            (router_logits, router_logits if bias is None else bias, weights, ids),
            (
                router_logits.stride(0),
                experts,
                topk,
                groups,
                topk_group,
                sigmoid,
                renormalize,
                factor,
                bias is not None,
                rows,
                power_of_two(groups),
                power_of_two(experts // groups),
                power_of_two(topk),
            ),
            sizes=(tokens,),
            warps=warps,
        )
    return weights, ids


def best(sigmoid: bool, alone: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the operator ``topk_softmax`` or ``topk_sigmoid``."""

    def topk(
        router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return choose(router_logits, topk, renormalize, sigmoid, bias, alone=alone)

    return topk


def best_of_groups(alone: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the operator ``grouped_topk``."""

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
        if scoring_func not in ("softmax", "sigmoid"):
            raise NotSupported(f"scoring_func '{scoring_func}'")
        groups = (num_expert_group, topk_group, routed_scaling_factor)
        return choose(router_logits, topk, renormalize, scoring_func == "sigmoid", bias, *groups, alone=alone)

    return grouped_topk


topk_softmax, topk_sigmoid, grouped_topk = best(False), best(True), best_of_groups()
