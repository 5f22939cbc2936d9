"""Mixture of experts: the experts themselves, and the steps around a grouped matrix product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import activation as activations
from .declaration import (
    STANDARD_TOLERANCE,
    Access,
    Mode,
    Operator,
    Reference,
    Sample,
    Tolerance,
    Work,
    Write,
    operator,
    row_terms,
    tokens_workload,
)
from .inputs import mixtures, rows, shapes
from .inputs.mixtures import Mixture
from .inputs.source import Source

OUTPUT = MappingProxyType({"out": Write(Access.OUTPUT)})
OPAQUE = frozenset({Mode.OPAQUE, Mode.EAGER})
# An implementation may round between its two products. The error is 0.6 units of roundoff times the size of a result
# (below one in the samples), and four to five times as much in the worst of thousands of elements. In float32 the
# products sum thousands of terms.
TOLERANCES = MappingProxyType(
    {
        **STANDARD_TOLERANCE,
        torch.float32: Tolerance(2e-5, 1e-5),
        torch.float16: Tolerance(2e-3, 1e-3),
        torch.bfloat16: Tolerance(1.6e-2, 8e-3),
    }
)
Product = Callable[[int, Tensor], Tensor]
"""An expert and its rows → the product, at least float32."""
CHAIN = 1.5
"""The mean error of a chain of kernels that may each round."""
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": activations.silu_and_mul.reference,
    "gelu": activations.gelu_and_mul.reference,
    "gelu_tanh": partial(activations.gelu_and_mul.reference, approximate="tanh"),
    "swigluoai": partial(activations.swigluoai_and_mul.reference, alpha=1.702, limit=7.0),
    "silu_no_mul": functional.silu,
    "gelu_no_mul": activations.gelu.reference,
    "gelu_tanh_no_mul": partial(activations.gelu.reference, approximate="tanh"),
    "relu2_no_mul": activations.relu2.reference,
}
"""The activation of an expert by name; names without a gate end with ``_no_mul``."""
PLAIN_ACTIVATIONS = tuple(name for name in ACTIVATIONS if name.endswith("_no_mul"))
GATED_ACTIVATIONS = tuple(name for name in ACTIVATIONS if name not in PLAIN_ACTIVATIONS)


# -- alignment for grouped matrix products ----------------------------------------------------------------------------


def aligned_blocks(pairs: int, block_size: int, num_experts: int) -> int:
    """Return the most blocks that :data:`moe_align_block_size` needs: every chosen expert pads its last block."""
    return (pairs + min(pairs, num_experts) * (block_size - 1)) // block_size


def _align_fake(topk_ids: Tensor, block_size: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = aligned_blocks(topk_ids.numel(), block_size, num_experts)
    sizes = (blocks * block_size, blocks, 1)
    sorted_token_ids, expert_ids, padded = (topk_ids.new_empty(size, dtype=torch.int32) for size in sizes)
    return sorted_token_ids, expert_ids, padded


def _align_work(topk_ids: Tensor, block_size: int, num_experts: int) -> Work:
    blocks = aligned_blocks(topk_ids.numel(), block_size, num_experts)
    return Work(topk_ids.nbytes + 4 * (blocks * (block_size + 1) + 1), 0)


def _align_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    def sample(
        label: str,
        tokens: int,
        topk: int,
        experts: int,
        block_size: int,
        *,
        local: int | None = None,
        padding: int = 0,
        serving: bool = True,
    ) -> Sample:
        ids = mixtures.choose(tokens, experts, topk, generator)
        ids[tokens - padding :] = -1
        expert_map = None
        if local is not None:
            expert_map = torch.full((experts,), -1, dtype=torch.int32)
            expert_map[torch.randperm(experts, generator=generator)[:local]] = torch.arange(local, dtype=torch.int32)
        args = (ids.to(device), block_size, experts, None if expert_map is None else expert_map.to(device))
        return Sample(label, args, serving)

    yield sample("decode, 32 tokens", 32, 8, 128, 16)
    yield sample("prefill, 300 tokens, 8 experts", 300, 2, 8, 64)
    yield sample("prefill, 130 tokens, 64 experts", 130, 6, 64, 32)
    yield sample("one token", 1, 8, 128, 16)
    yield sample("a quarter of the experts is here", 40, 8, 64, 16, local=16)
    yield sample("padding tokens", 12, 4, 32, 8, padding=5, serving=False)
    yield sample("no expert is here", 5, 2, 8, 16, local=0, serving=False)
    yield sample("only padding tokens", 3, 2, 8, 16, padding=3, serving=False)
    yield sample("blocks of one", 9, 3, 7, 1, serving=False)
    yield sample("empty batch", 0, 4, 16, 16, serving=False)


def _local(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Return the expert of each pair as numbered on this rank, flat, int64; -1 for experts of other ranks."""
    ids = topk_ids.flatten().long()
    if expert_map is None:
        return ids
    return torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], -1)


@operator(
    modes=OPAQUE,
    fake=_align_fake,
    samples=_align_samples,
    shapes=shapes.alignment,
    workload=tokens_workload,
    work=_align_work,
)
def moe_align_block_size(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (token, choice) pairs by expert and pad each expert to whole blocks, for a grouped matrix product.

    Pair ``token * topk + choice`` goes to expert ``topk_ids[token, choice]``. Pairs with a negative expert, or one that
    ``expert_map`` maps to -1, get no place. The result's sizes depend on shapes alone: ``blocks = (pairs + min(pairs,
    num_experts) * (block_size - 1)) // block_size``, which is always enough.

    Args:
        topk_ids: ``[tokens, topk]``, int32 or int64.
        block_size: pairs in a block.
        num_experts: number of experts that ``topk_ids`` may name.
        expert_map: ``[num_experts]``, int32: the number that an expert has on this rank, -1 for one of another rank; or
            ``None`` for the same numbers.

    Returns:
        ``sorted_token_ids``, ``[blocks * block_size]``, int32: pairs, sorted by their expert's number on this rank and
        then by their own; padding holds the number of pairs. ``expert_ids``, ``[blocks]``, int32: the expert of each
        block as numbered on this rank; -1 for unused blocks at the end. ``num_tokens_post_padded``, ``[1]``, int32:
        places in used blocks.
    """
    pairs, device = topk_ids.numel(), topk_ids.device
    blocks = aligned_blocks(pairs, block_size, num_experts)
    places = blocks * block_size
    sorted_token_ids = torch.full((places + 1,), pairs, dtype=torch.int32, device=device)  # and one for what is dropped
    local = _local(topk_ids, expert_map)
    local = torch.where(local < 0, num_experts, local)  # sorts to the end
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(
        0, local, torch.ones_like(local)
    )
    used = (counts + block_size - 1) // block_size
    used[num_experts] = 0
    order = local.argsort(stable=True)
    expert = local[order]
    rank = torch.arange(pairs, device=device) - (counts.cumsum(0) - counts)[expert]
    place = ((used.cumsum(0) - used) * block_size)[expert] + rank
    sorted_token_ids[torch.where(expert < num_experts, place, places)] = order.int()
    ends = used.cumsum(0)[:num_experts]
    block = torch.arange(blocks, device=device)
    expert_ids = torch.searchsorted(ends, block, right=True)
    expert_ids = torch.where(expert_ids < num_experts, expert_ids, -1).int()
    return sorted_token_ids[:places], expert_ids, (used.sum() * block_size).int().reshape(1)


# -- sum over a token's experts ---------------------------------------------------------------------------------------


def _sum_fake(x: Tensor, out: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2])) if out is None else out


def _sum_work(x: Tensor) -> Work:
    tokens, topk, hidden = x.shape
    return Work(x.element_size() * tokens * (topk + 1) * hidden, tokens * topk * hidden)


def _sum_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    normal = Source(dtype, device, generator).normal
    yield Sample("decode, 32 tokens", (normal(32, 8, 2048), None))
    yield Sample("prefill, 200 tokens, with out", (normal(200, 2, 1024), normal(200, 1024)))
    yield Sample("one token", (normal(1, 6, 4096), None))
    yield Sample("one expert, odd hidden size", (normal(5, 1, 67), None), serving=False)
    yield Sample("row stride larger than the row", (normal(3, 4, 96)[..., :64], None), serving=False)
    yield Sample("empty batch", (normal(0, 4, 64), None), serving=False)


@operator(
    writes=OUTPUT,
    modes=frozenset({Mode.INLINE, Mode.OPAQUE, Mode.EAGER}),
    fake=_sum_fake,
    samples=_sum_samples,
    probes=rows.moe_sum,
    shapes=shapes.expert_sums,
    workload=tokens_workload,
    work=_sum_work,
)
def moe_sum(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum over the experts of each token.

    Args:
        x: ``[tokens, topk, hidden]``, floating point: outputs of a token's experts, already weighted.
        out: ``[tokens, hidden]``, dtype of ``x``, or ``None`` for a new tensor. Overwritten.

    Returns:
        ``[tokens, hidden]``, dtype of ``x``: ``out`` if given.
    """
    total = x.to(torch.promote_types(x.dtype, torch.float32)).sum(dim=1).to(x.dtype)
    return total if out is None else out.copy_(total)


# -- the experts ------------------------------------------------------------------------------------------------------


def empty_mixture(hidden_states: Tensor, out: Tensor | None) -> Tensor:
    """Return an empty result of a mixture."""
    return hidden_states.new_empty(hidden_states.shape) if out is None else out


def experts(**declaration: Any) -> Callable[[Reference], Operator[Reference]]:
    """Declare a mixture of experts; see :func:`~fl_dispatch.ops.declaration.operator`."""
    return operator(
        writes=OUTPUT,
        modes=OPAQUE,
        fake=empty_mixture,
        tolerances=TOLERANCES,
        terms=row_terms,
        mean_error=CHAIN,
        workload=tokens_workload,
        waits=True,
        **declaration,
    )


def read_experts(topk_ids: Tensor, expert_map: Tensor | None) -> tuple[int, int]:
    """Return the choices that this rank computes, and the number of distinct experts among them."""
    local = topk_ids[topk_ids >= 0].long()
    if expert_map is not None:
        local = expert_map[local]
        local = local[local >= 0]
    return len(local), len(torch.unique(local))


def _work(
    hidden_states: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None
) -> Work:
    chosen, distinct = read_experts(topk_ids, expert_map)
    # weights of one expert: a multiplication and an addition each
    expert = w13.shape[1] * w13.shape[2] + w2.shape[1] * w2.shape[2]
    read = 2 * hidden_states.numel() + expert * distinct
    choices = topk_ids.numel() * (topk_weights.element_size() + topk_ids.element_size())
    return Work(read * hidden_states.element_size() + choices, 2 * expert * chosen)


def _samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    normal = Source(dtype, device, generator).normal

    def sample(label: str, *sizes: int | str, serving: bool = True, **rest: Any) -> Sample:
        mixture = Mixture(*sizes, **rest)  # type: ignore[arg-type]
        here, inputs, hidden, inner = mixture.here, mixture.inputs, mixture.hidden, mixture.inner
        args = (
            normal(mixture.tokens, hidden),
            normal(here, inputs, hidden, scale=hidden**-0.5),
            normal(here, hidden, inner, scale=inner**-0.5),
            *mixture.routing(device, generator),
            normal(here, inputs, scale=0.25) if mixture.biases else None,
            normal(here, hidden, scale=0.25) if mixture.biases else None,
            normal(mixture.tokens, hidden) if mixture.out else None,
        )
        return Sample(label, args, serving)

    yield sample("decode, 32 tokens, 128 experts", 32, 128, 8, 128, 24)
    yield sample("prefill, 100 tokens, 8 experts", 100, 8, 2, 128, 112, out=True)
    yield sample("64 experts", 17, 64, 6, 96, 22)
    yield sample("one token", 1, 8, 2, 256, 64, out=True)
    yield sample("half of the experts is here", 20, 32, 4, 96, 64, local=range(16, 32))
    yield sample("swigluoai, biases", 9, 32, 4, 90, 64, "swigluoai", biases=True)
    yield sample("weight on the input", 6, 16, 1, 96, 64, on_input=True)
    yield sample("weights on the input, biases", 5, 8, 2, 64, 32, on_input=True, biases=True, serving=False)
    yield sample("gelu, odd sizes", 7, 5, 3, 67, 33, "gelu", serving=False)
    yield sample("gelu_tanh", 7, 5, 3, 64, 32, "gelu_tanh", serving=False)
    for activation in PLAIN_ACTIVATIONS:
        yield sample(activation, 5, 6, 2, 64, 32, activation, biases=True, serving=False)
    yield sample("padding tokens with out", 8, 6, 2, 64, 32, padding=3, out=True, serving=False)
    yield sample("empty rank: no expert is here", 1, 8, 1, 64, 32, local=[], serving=False)
    yield sample("empty batch", 0, 8, 2, 64, 32, serving=False)


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
    """Compute the experts of each token, expert by expert, with the two products given as functions.

    Waits for the device once, to read the experts' loads.
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
        # A token has an expert once, so rows of one addition are distinct and the order of the sum is fixed.
        total.index_add_(0, tokens, y if apply_router_weight_on_input else y * weight)
    result = total.to(hidden_states.dtype)
    return result if out is None else out.copy_(result)


@experts(work=_work, weights=("w13", "w2"), samples=_samples, shapes=shapes.mixture, aliases=("moe", "fused_experts"))
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
    """The experts of each token and the weighted sum of their outputs (Shazeer et al., arXiv 1701.06538).

    Expert ``e`` computes ``w2[e] @ act(w13[e] @ x + w13_bias[e]) + w2_bias[e]``. A choice with a negative number, or of
    an expert that ``expert_map`` maps to -1, adds nothing.

    Activations of a gated expert, with the rows of the gate and then those of ``up`` in ``w13``: ``"silu"``,
    ``"gelu"``, ``"gelu_tanh"``: ``act(gate) * up``. ``"swigluoai"``, with alternating rows, gate first: ``gate *
    sigmoid(1.702 * gate) * (up + 1)``, the gate at most 7 and ``up`` between -7 and 7. For an expert without a gate:
    ``"silu_no_mul"``, ``"gelu_no_mul"``, ``"gelu_tanh_no_mul"``, ``"relu2_no_mul"`` (the square of ``relu``).

    Args:
        hidden_states: ``[tokens, hidden]``, floating point.
        w13: ``[local experts, 2 * inner, hidden]``, dtype of ``hidden_states``; ``[.., inner, ..]`` without a gate.
        w2: ``[local experts, hidden, inner]``, dtype of ``hidden_states``.
        topk_weights: ``[tokens, topk]``, floating point, usually float32.
        topk_ids: ``[tokens, topk]``, int32 or int64: the experts of a token, each at most once.
        activation: see above; others raise ``NotImplementedError``.
        apply_router_weight_on_input: whether the weight multiplies the expert's input, not its output.
        expert_map: ``[experts]``, int32: the number that an expert has on this rank, -1 for one of another rank; or
            ``None`` for the same numbers.
        w13_bias: ``[local experts, rows of w13]``, or ``None``.
        w2_bias: ``[local experts, hidden]``, or ``None``.
        out: shape and dtype of ``hidden_states``, or ``None`` for a new tensor. Overwritten; shares no memory with an
            input.

    Returns:
        Shape and dtype of ``hidden_states``: ``out`` if given. With several ranks a partial sum.
    """

    def product(weight: Tensor, bias: Tensor | None) -> Product:
        def of(expert: int, x: Tensor) -> Tensor:
            return functional.linear(x, weight[expert].to(x.dtype), None if bias is None else bias[expert].to(x.dtype))

        return of

    routing = (topk_weights, topk_ids, activation, apply_router_weight_on_input, expert_map, out)
    return mixture(hidden_states, w13.shape[0], *routing, product(w13, w13_bias), product(w2, w2_bias))
