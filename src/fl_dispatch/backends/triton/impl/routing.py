"""Routing: a program scores some tokens over all experts and takes the best ones, one after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.errors import NotSupported

from .launch import Launcher, power_of_two

MANY_TOKENS = 1024
"""From so many tokens on a program takes several, a warp each."""


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
    """Experts lie in a tile as ``[groups, members of a group]``; without groups there is one, of all experts."""
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    BLOCK: tl.constexpr = BLOCK_GROUPS * BLOCK_MEMBERS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    group = column // BLOCK_MEMBERS
    member = column % BLOCK_MEMBERS
    expert = group * MEMBERS + member
    known = (group < GROUPS) & (member < MEMBERS)
    source = logits + row.to(tl.int64)[:, None] * TOKEN_STRIDE + expert[None, :]
    wide: tl.constexpr = tl.float64 if logits.dtype.element_ty == tl.float64 else tl.float32
    inside = (row < tokens)[:, None] & known[None, :]
    x = tl.load(source, mask=inside, other=0.0).to(wide)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        x = tl.where(known[None, :], x, float("-inf"))
        x = tl.exp(x - tl.max(x, axis=1)[:, None])
        scores = x / tl.sum(x, axis=1)[:, None]
    choice = scores
    if BIASED:
        choice = scores + tl.load(bias + expert, mask=known, other=0.0).to(wide)[None, :]
    choice = tl.where(known[None, :], choice, float("-inf"))
    if TOPK_GROUP < GROUPS:
        grouped = tl.reshape(choice, (ROWS, BLOCK_GROUPS, BLOCK_MEMBERS))
        values = tl.max(grouped, axis=2)
        if BIASED:
            first = tl.argmax(grouped, axis=2)
            others = tl.where(tl.arange(0, BLOCK_MEMBERS)[None, None, :] == first[:, :, None], float("-inf"), grouped)
            values += tl.max(others, axis=2)
        place = tl.arange(0, BLOCK_GROUPS)[None, :]
        values = tl.where(place < GROUPS, values, float("-inf"))
        open_ = tl.zeros((ROWS, BLOCK_GROUPS), dtype=tl.int32)
        for _ in tl.static_range(TOPK_GROUP):
            best = place == tl.argmax(values, axis=1)[:, None]
            open_ = tl.where(best, 1, open_)
            values = tl.where(best, float("-inf"), values)
        closed = tl.broadcast_to((open_ == 0)[:, :, None], (ROWS, BLOCK_GROUPS, BLOCK_MEMBERS))
        choice = tl.where(tl.reshape(closed, (ROWS, BLOCK)), float("-inf"), choice)
    slot = tl.arange(0, BLOCK_TOPK)[None, :]
    found = tl.zeros((ROWS, BLOCK_TOPK), dtype=wide)
    chosen = tl.zeros((ROWS, BLOCK_TOPK), dtype=tl.int32)
    for k in tl.static_range(TOPK):
        best = column[None, :] == tl.argmax(choice, axis=1)[:, None]
        found = tl.where(slot == k, tl.sum(tl.where(best, scores, 0.0), axis=1)[:, None], found)
        chosen = tl.where(slot == k, tl.sum(tl.where(best, expert[None, :], 0), axis=1)[:, None], chosen)
        choice = tl.where(best, float("-inf"), choice)
    if RENORMALIZE:
        found = found / (tl.sum(found, axis=1)[:, None] + 1e-20)  # SMALLEST_SUM
    target = row.to(tl.int64)[:, None] * TOPK + slot
    inside = (row < tokens)[:, None] & (slot < TOPK)
    tl.store(weights + target, (found * FACTOR).to(tl.float32), mask=inside)
    tl.store(ids + target, chosen, mask=inside)


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
    """Weights and numbers of the best experts; with ``alone`` a program never takes several tokens."""
    tokens, experts = router_logits.shape
    if router_logits.stride(1) != 1:
        router_logits = router_logits.contiguous()
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    weights = router_logits.new_empty((tokens, topk), dtype=torch.float32)
    ids = router_logits.new_empty((tokens, topk), dtype=torch.int32)
    if tokens:
        rows = 1 if alone or tokens < MANY_TOKENS else 4
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
            warps=rows,
        )
    return weights, ids


def topk_softmax(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_softmax`."""
    return choose(router_logits, topk, renormalize, False, bias)


def topk_sigmoid(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.routing.topk_sigmoid`."""
    return choose(router_logits, topk, renormalize, True, bias)


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
    if scoring_func not in ("softmax", "sigmoid"):
        raise NotSupported(f"scoring_func '{scoring_func}'")
    sigmoid = scoring_func == "sigmoid"
    return choose(router_logits, topk, renormalize, sigmoid, bias, num_expert_group, topk_group, routed_scaling_factor)
