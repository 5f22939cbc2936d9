"""Routing: the experts of each token, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .declaration import STANDARD_TOLERANCE, Mode, Operator, Reference, Sample, Samples, Work, operator
from .inputs import shapes

MODES = frozenset({Mode.INLINE, Mode.OPAQUE, Mode.EAGER})
# Scores are computed and returned in float32, whatever the dtype of the logits.
TOLERANCES = MappingProxyType(dict.fromkeys(STANDARD_TOLERANCE, STANDARD_TOLERANCE[torch.float32]))

# Rounding could swap scores closer than this, so samples keep them apart.
GAP = 2e-6

# Added to a sum before it divides, so that scores that have all underflowed give zeros; no other result changes.
SMALLEST_SUM = 1e-20


def _fake(router_logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], topk)
    return router_logits.new_empty(shape, dtype=torch.float32), router_logits.new_empty(shape, dtype=torch.int32)


def _work(router_logits: Tensor, topk: int) -> Work:
    read = router_logits.nbytes
    return Work(read + 8 * router_logits.shape[0] * topk, 4 * router_logits.numel())


def _router(**declaration: Any) -> Callable[[Reference], Operator[Reference]]:
    return operator(modes=MODES, fake=_fake, tolerances=TOLERANCES, work=_work, **declaration)


def _draw(
    tokens: int, experts: int, dtype: torch.dtype, generator: torch.Generator, clear: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return logits between -8 and 8 in random order, distinct in each row in every dtype; redraw ambiguous rows."""
    logits = torch.empty(tokens, experts, dtype=dtype)
    wanted = torch.arange(tokens)
    while len(wanted):
        order = torch.rand(len(wanted), experts, generator=generator).argsort(-1)
        scale = 2.0 ** torch.randint(-1, 2, (len(wanted), 1), generator=generator)
        logits[wanted] = ((order - experts // 2) * scale * (8 / experts)).to(dtype)
        wanted = wanted[~clear(logits[wanted].double())]
    return logits


def _apart(scores: Tensor, count: int) -> Tensor:
    """Return for each row whether its ``count`` best scores and the next one are clearly apart."""
    best = scores.topk(min(count + 1, scores.shape[-1])).values
    return (best[:, :-1] - best[:, 1:] > GAP).all(-1)


def _samples(score: Callable[[Tensor], Tensor], spread: float) -> Samples:
    """Return samples of a top-k with these scores; a bias of ``spread`` changes some choices."""

    def samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
        def sample(
            label: str,
            tokens: int,
            experts: int,
            topk: int,
            renormalize: bool = True,
            *,
            biased: bool = False,
            padding: int = 0,
            serving: bool = True,
        ) -> Sample:
            bias = spread * torch.randn(experts, generator=generator) if biased else None

            def clear(logits: Tensor) -> Tensor:
                return _apart(score(logits) + (0.0 if bias is None else bias), topk)

            logits = torch.nn.functional.pad(_draw(tokens, experts, dtype, generator, clear), (0, padding))
            logits = logits.to(device)[:, :experts]
            return Sample(label, (logits, topk, renormalize, None if bias is None else bias.to(device)), serving)

        yield sample("decode, 32 tokens", 32, 128, 8)
        yield sample("prefill, 300 tokens, 8 experts", 300, 8, 2)
        yield sample("64 experts, not renormalized", 17, 64, 6, False)
        yield sample("60 experts", 5, 60, 4, False)
        yield sample("256 experts, bias", 9, 256, 8, biased=True)
        yield sample("one token, 256 experts", 1, 256, 10)
        yield sample("bias, not renormalized", 33, 32, 4, False, biased=True, serving=False)
        yield sample("row stride larger than the row", 6, 24, 3, padding=8, serving=False)
        yield sample("best of two", 4, 2, 1, False, serving=False)
        yield sample("every expert", 3, 4, 4, serving=False)
        yield sample("empty batch", 0, 16, 2, serving=False)

    return samples


def scores(router_logits: Tensor, scoring_func: str) -> Tensor:
    """Return the experts' scores, at least float32."""
    wide = router_logits.to(torch.promote_types(router_logits.dtype, torch.float32))
    if scoring_func == "softmax":
        return wide.softmax(dim=-1)
    if scoring_func == "sigmoid":
        return wide.sigmoid()
    raise NotImplementedError(f"scoring_func '{scoring_func}'")


def _result(scores: Tensor, chosen: Tensor, topk: int, renormalize: bool, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return weights and numbers of the experts that are best by ``chosen``."""
    ids = chosen.topk(topk, dim=-1).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return (weights * factor).float(), ids.int()


def best(scores: Tensor, topk: int, renormalize: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights and numbers of the experts with the best scores."""
    return _result(scores, scores if bias is None else scores + bias, topk, renormalize)


def best_of_groups(
    scores: Tensor, topk: int, num_groups: int, topk_group: int, renormalize: bool, factor: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return weights and numbers of the experts with the best scores in the best groups."""
    groups = (len(scores), num_groups, scores.shape[-1] // num_groups)
    grouped = (scores if bias is None else scores + bias).view(groups)
    values = grouped.amax(dim=-1) if bias is None else grouped.topk(2, dim=-1).values.sum(dim=-1)
    inside = torch.zeros_like(values).scatter(-1, values.topk(topk_group, dim=-1).indices, 1.0) > 0
    chosen = grouped.masked_fill(~inside.unsqueeze(-1), float("-inf")).flatten(-2)
    return _result(scores, chosen, topk, renormalize, factor)


@_router(
    samples=_samples(lambda logits: logits.softmax(-1), 0.01),
    shapes=shapes.routing,
    aliases=("fused_topk", "select_experts"),
)
def topk_softmax(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ``topk`` experts of each token by softmax over all experts, and their probabilities.

    Args:
        router_logits: ``[tokens, experts]``, floating point.
        topk: number of experts per token, at most ``experts``.
        renormalize: divide a token's weights by their sum; weights that are all zero stay zero.
        bias: ``[experts]``, floating point, or ``None``. Added to the probabilities to choose the experts, not to the
            weights (Wang et al., arXiv 2408.15664).

    Returns:
        Weights, ``[tokens, topk]``, float32, and expert numbers, ``[tokens, topk]``, int32, both in descending order of
        the scores used for the choice; the order of equal scores is unspecified.
    """
    return best(scores(router_logits, "softmax"), topk, renormalize, bias)


@_router(samples=_samples(torch.sigmoid, 0.1), shapes=shapes.routing)
def topk_sigmoid(
    router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ``topk`` experts of each token by the sigmoid of each logit, and these scores.

    Args:
        router_logits: ``[tokens, experts]``, floating point.
        topk: number of experts per token, at most ``experts``.
        renormalize: divide a token's weights by their sum; weights that are all zero stay zero.
        bias: ``[experts]``, floating point, or ``None``. Added to the scores to choose the experts, not to the weights.

    Returns:
        Weights, ``[tokens, topk]``, float32, and expert numbers, ``[tokens, topk]``, int32, both in descending order of
        the scores used for the choice; the order of equal scores is unspecified.
    """
    return best(scores(router_logits, "sigmoid"), topk, renormalize, bias)


def _grouped_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    def sample(
        label: str,
        tokens: int,
        experts: int,
        topk: int,
        groups: int,
        topk_group: int,
        renormalize: bool = False,
        scoring_func: str = "softmax",
        factor: float = 1.0,
        *,
        biased: bool = False,
        serving: bool = True,
    ) -> Sample:
        bias = 0.1 * torch.randn(experts, generator=generator) if biased else None

        def clear(logits: Tensor) -> Tensor:
            scores = logits.softmax(-1) if scoring_func == "softmax" else logits.sigmoid()
            chosen = scores + (0.0 if bias is None else bias)
            grouped = chosen.view(len(logits), groups, -1)
            value = grouped.amax(-1) if bias is None else grouped.topk(2).values.sum(-1)
            inside = torch.zeros_like(value).scatter(1, value.topk(topk_group).indices, 1.0).bool()
            chosen = grouped.masked_fill(~inside[..., None], -1.0).flatten(1)
            border = value.topk(min(topk_group + 1, groups)).values[:, -2:]
            return _apart(chosen, topk) & ((border.amax(-1) - border.amin(-1) > GAP) | (topk_group == groups))

        logits = _draw(tokens, experts, dtype, generator, clear).to(device)
        choice = (topk, groups, topk_group, renormalize, scoring_func, factor)
        return Sample(label, (logits, *choice, None if bias is None else bias.to(device)), serving)

    yield sample("decode, 32 tokens", 32, 256, 8, 8, 4, True, "sigmoid", 2.5, biased=True)
    yield sample("prefill, 130 tokens, softmax, 160 experts", 130, 160, 6, 8, 3, False, "softmax", 16.0)
    yield sample("softmax, one group of 64", 19, 64, 6, 1, 1)
    yield sample("one token, 128 experts, sigmoid", 1, 128, 8, 4, 2, True, "sigmoid", biased=True)
    yield sample("sigmoid without a bias", 7, 32, 4, 4, 2, False, "sigmoid", serving=False)
    yield sample("softmax with a bias, renormalized", 12, 32, 3, 8, 2, True, biased=True, serving=False)
    yield sample("every group", 6, 24, 4, 3, 3, True, "softmax", 0.5, serving=False)
    yield sample("every expert of one group", 5, 16, 4, 4, 1, True, "sigmoid", serving=False)
    yield sample("empty batch", 0, 16, 2, 4, 2, serving=False)


@_router(samples=_grouped_samples, shapes=shapes.grouped_routing, aliases=("biased_grouped_topk",))
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
    """The ``topk`` experts of each token among those of its best groups (arXiv 2405.04434; with a bias 2412.19437).

    Experts are grouped in order. A group's score is that of its best expert, or with a bias the sum of its two best.

    Args:
        router_logits: ``[tokens, experts]``, floating point.
        topk: number of experts per token, at most those of ``topk_group`` groups.
        num_expert_group: number of groups; it divides ``experts``.
        topk_group: number of groups that a token may use.
        renormalize: divide a token's weights by their sum, before the factor; weights that are all zero stay zero.
        scoring_func: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        routed_scaling_factor: factor of the weights.
        bias: ``[experts]``, floating point, or ``None``. Added to the scores to choose groups and experts, not to the
            weights.

    Returns:
        Weights, ``[tokens, topk]``, float32, and expert numbers, ``[tokens, topk]``, int32, both in descending order of
        the scores used for the choice; the order of equal scores is unspecified.
    """
    found = scores(router_logits, scoring_func)
    return best_of_groups(found, topk, num_expert_group, topk_group, renormalize, routed_scaling_factor, bias)
