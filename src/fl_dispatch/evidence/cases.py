"""What benchmarks run: for each operator the shapes that a served model gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..devices import device_of
from ..ops import Operator

WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Columns and inner sizes of the products in a layer of Llama-3.1-8B."""
FEW_ROWS = (1, 2, 8, 32)
TOKENS = (1, 16, 256, 1024, 4096, 16384)
HIDDEN = (4096, 5120, 7168, 8192)
HEAD_DIM, KV_HEADS, BLOCK_SIZE = 128, 8, 16
DECODE = ((1, 1024), (1, 8192), (8, 1024), (8, 8192), (32, 1024), (32, 4096), (128, 1024), (128, 4096))
PREFILL = ((4, 512), (1, 2048), (4, 2048), (1, 8192), (4, 4096))
EXPERTS = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "DeepSeek-V2-Lite": (64, 6, 2048, 1408)}
"""Experts, choices of a token, hidden size, inner size."""
LATENT_RANK, LATENT_ROPE, LATENT_DIM, LATENT_BLOCK_SIZE = 512, 64, 128, 64
LATENT_DECODE = ((1, 1024), (1, 8192), (8, 4096), (32, 4096), (128, 2048))
LATENT_HEADS = (16, 128)


@dataclass(frozen=True)
class Case:
    """One shape of one operator.

    Args:
        op_name: the operator.
        label: what distinguishes it from the operator's other cases, such as ``with residual``.
        tokens: new tokens of the call.
        width: what the operator is wide by: hidden size, or the context's length for attention.
        make: makes arguments in memory of their own.
    """

    op_name: str
    label: str
    tokens: int
    width: int
    make: Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Place:
    """Where and in which dtype arguments are made."""

    dtype: torch.dtype
    device: torch.device

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(self.dtype)


def cases(operator: Operator, place: Place, tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Case]:
    """The cases of an operator; for one that this module does not know, its serving samples.

    Args:
        operator: the declaration.
        place: of the arguments.
        tokens, hidden: sizes of row-wise operators. Attention has batches and contexts of its own, up to the largest
            of ``tokens`` in all (for decode 32 times as many keys), and at least one.
    """
    name = operator.name
    if name == "linear":
        yield from _products(place, max(tokens))
    elif name in ("silu_and_mul", "gelu_and_mul"):
        yield from _rows(name, "", tokens, hidden, lambda t, h: (place.normal(t, 2 * h),))
    elif name in ("rms_norm", "gemma_rms_norm"):
        weights = {h: place.normal(h) for h in hidden}
        yield from _rows(name, "", tokens, hidden, lambda t, h: (place.normal(t, h), None, weights[h], 1e-6))
        yield from _rows(
            name, "with residual", tokens, hidden,
            lambda t, h: (place.normal(t, h), place.normal(t, h), weights[h], 1e-6),
        )  # fmt: skip
    elif name == "rotary_embedding":
        yield from _rows(name, "", tokens, hidden, lambda t, h: _rotary(place, t, h // HEAD_DIM))
    elif name == "kv_cache_write":
        width = KV_HEADS * HEAD_DIM
        yield from _rows(name, "", tokens, (width,), lambda t, h: _write(place, t))
    elif name == "paged_attention":
        yield from _attention(place, max(32, *tokens))
    elif name in MIXTURE and device_of(place.device.type).accelerator:  # too large for a CPU
        yield from MIXTURE[name](place, tokens)
    elif name == "mla_decode" and device_of(place.device.type).accelerator:
        yield from _latent_decode(place, max(32, *tokens))
    elif name == "mla_prefill" and device_of(place.device.type).accelerator:
        yield from _latent_prefill(place, max(32, *tokens))
    elif operator.samples is not None:
        yield from _samples(operator, place)


def _rows(
    name: str,
    label: str,
    tokens: Sequence[int],
    hidden: Sequence[int],
    make: Callable[[int, int], tuple[Any, ...]],
) -> Iterator[Case]:
    for width in hidden:
        for count in tokens:
            yield Case(name, label, count, width, lambda t=count, h=width: make(t, h))  # type: ignore[misc]


def _products(place: Place, most: int) -> Iterator[Case]:
    if not device_of(place.device.type).accelerator:  # as wide as they are they would take minutes there
        shapes: Sequence[tuple[int, int]] = ((1024, 1024),)
    else:
        shapes = WEIGHTS
    for columns, inner in shapes:
        weight = place.normal(columns, inner)
        label = f"{columns} columns"
        for rows in FEW_ROWS:
            if rows <= most:
                make = lambda r=rows, i=inner, w=weight: (place.normal(r, i), w.clone())  # noqa: E731
                yield Case("linear", label, rows, inner, make)


def _rotary(place: Place, tokens: int, heads: int) -> tuple[Any, ...]:
    projection = place.normal(tokens, heads + 2 * KV_HEADS, HEAD_DIM)
    query, key, _ = torch.tensor_split(projection, (heads, heads + KV_HEADS), dim=1)
    frequencies = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2, device=place.device) / HEAD_DIM)
    angles = torch.outer(torch.arange(32768, device=place.device), frequencies)
    cos, sin = torch.cat((angles.cos(), angles.sin()), -1).to(place.dtype).chunk(2, -1)
    return query, key, cos, sin, torch.arange(tokens, device=place.device)


def _caches(place: Place, blocks: int) -> tuple[Tensor, Tensor]:
    """As vLLM has them: ``[blocks, kv_heads, block_size, key and value]`` in memory."""
    values = place.normal(blocks, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM).transpose(1, 2)
    return values[..., :HEAD_DIM], values[..., HEAD_DIM:]


def _write(place: Place, tokens: int) -> tuple[Any, ...]:
    projection = place.normal(tokens, 2 * KV_HEADS, HEAD_DIM)
    key, value = projection.chunk(2, dim=1)
    blocks = -(-tokens // BLOCK_SIZE) + 1
    pages = torch.randperm(blocks, device=place.device).repeat_interleave(BLOCK_SIZE) * BLOCK_SIZE
    slots = (pages + torch.arange(BLOCK_SIZE, device=place.device).repeat(blocks))[:tokens]
    return key, value, *_caches(place, blocks), slots


def _attention(place: Place, most: int) -> Iterator[Case]:
    for batch, context in DECODE:
        if batch * context <= 32 * most:
            make = lambda b=batch, c=context: _attend(place, b, 1, c)  # noqa: E731
            yield Case("paged_attention", f"decode, {batch} requests", batch, context, make)
    for batch, length in PREFILL:
        if batch * length <= most:
            make = lambda b=batch, n=length: _attend(place, b, n, n)  # noqa: E731
            yield Case("paged_attention", f"prefill, {batch} requests", batch * length, length, make)


def _attend(place: Place, requests: int, new: int, context: int, heads: int = 32) -> tuple[Any, ...]:
    blocks = -(-context // BLOCK_SIZE)
    table = torch.randperm(requests * blocks, device=place.device).to(torch.int32).view(requests, blocks)
    starts = torch.arange(requests + 1, device=place.device, dtype=torch.int32) * new
    lengths = torch.full((requests,), context, device=place.device, dtype=torch.int32)
    query = place.normal(requests * new, heads, HEAD_DIM)
    caches = _caches(place, requests * blocks)
    out = torch.empty_like(query)
    return query, *caches, table, starts, lengths, new, context, HEAD_DIM**-0.5, out


def _latent_decode(place: Place, most: int) -> Iterator[Case]:
    for heads in LATENT_HEADS:
        for batch, context in LATENT_DECODE:
            if batch * context <= 32 * most:
                make = lambda h=heads, b=batch, c=context: _latent(place, h, b, c)  # noqa: E731
                yield Case("mla_decode", f"decode, {heads} heads, {batch} requests", batch, context, make)


def _latent(place: Place, heads: int, requests: int, context: int) -> tuple[Any, ...]:
    width, blocks = LATENT_RANK + LATENT_ROPE, -(-context // LATENT_BLOCK_SIZE)
    cache = place.normal(requests * blocks, LATENT_BLOCK_SIZE, width)
    table = torch.randperm(requests * blocks, device=place.device).to(torch.int32).view(requests, blocks)
    starts = torch.arange(requests + 1, device=place.device, dtype=torch.int32)
    lengths = torch.full((requests,), context, device=place.device, dtype=torch.int32)
    query = place.normal(requests, heads, width)
    scale = (LATENT_DIM + LATENT_ROPE) ** -0.5
    return query, cache, table, starts, lengths, 1, context, scale, LATENT_RANK, place.normal(requests, heads, 512)


def _latent_prefill(place: Place, most: int) -> Iterator[Case]:
    for batch, length in PREFILL:
        if batch * length <= most:
            make = lambda b=batch, n=length: _heads(place, LATENT_HEADS[0], b, n)  # noqa: E731
            yield Case("mla_prefill", f"prefill, {batch} requests", batch * length, length, make)


def _heads(place: Place, heads: int, requests: int, length: int) -> tuple[Any, ...]:
    tokens, width = requests * length, LATENT_DIM + LATENT_ROPE
    value = place.normal(tokens, heads, 2 * LATENT_DIM)[..., LATENT_DIM:]  # it lies beside the keys' larger part
    starts = torch.arange(requests + 1, device=place.device, dtype=torch.int32) * length
    query, key = place.normal(tokens, heads, width), place.normal(tokens, heads, width)
    return query, key, value, starts, starts, length, length, width**-0.5


def _routed(place: Place, tokens: int, experts: int, topk: int) -> tuple[Tensor, Tensor]:
    weights, ids = torch.randn(tokens, experts, device=place.device).softmax(-1).topk(topk)
    return weights, ids.to(torch.int32)


def _experts(place: Place, tokens: Sequence[int]) -> Iterator[Case]:
    for model, (experts, topk, hidden, inner) in EXPERTS.items():

        def make(count: int, e: int = experts, k: int = topk, h: int = hidden, i: int = inner) -> tuple[Any, ...]:
            weights = torch.randn(e, 2 * i, h, device=place.device, dtype=place.dtype) * h**-0.5
            down = torch.randn(e, h, i, device=place.device, dtype=place.dtype) * i**-0.5
            return place.normal(count, h), weights, down, *_routed(place, count, e, k)

        for count in tokens:
            yield Case("fused_moe", model, count, hidden, lambda t=count, make=make: make(t))  # type: ignore[misc]


def _routing(place: Place, tokens: Sequence[int]) -> Iterator[Case]:
    experts, topk, *_ = EXPERTS["Qwen3-30B-A3B"]
    make = lambda t, e: (place.normal(t, e), topk, True)  # noqa: E731
    yield from _rows("topk_softmax", "", tokens, (experts,), make)


def _grouped_routing(place: Place, tokens: Sequence[int]) -> Iterator[Case]:
    """As DeepSeek-V3 routes."""
    bias = torch.randn(256, device=place.device) * 0.1
    make = lambda t, e: (place.normal(t, e), 8, 8, 4, True, "sigmoid", 2.5, bias)  # noqa: E731
    yield from _rows("grouped_topk", "", tokens, (256,), make)


def _alignment(place: Place, tokens: Sequence[int]) -> Iterator[Case]:
    experts, topk, *_ = EXPERTS["Qwen3-30B-A3B"]
    make = lambda t, e: (_routed(place, t, e, topk)[1], 64 if t * topk > 16 * e else 16, e)  # noqa: E731
    yield from _rows("moe_align_block_size", "", tokens, (experts,), make)


def _sums(place: Place, tokens: Sequence[int]) -> Iterator[Case]:
    _, topk, hidden, _ = EXPERTS["Qwen3-30B-A3B"]
    yield from _rows("moe_sum", "", tokens, (hidden,), lambda t, h: (place.normal(t, topk, h),))


MIXTURE: dict[str, Callable[[Place, Sequence[int]], Iterator[Case]]] = {
    "fused_moe": _experts,
    "topk_softmax": _routing,
    "grouped_topk": _grouped_routing,
    "moe_align_block_size": _alignment,
    "moe_sum": _sums,
}


def _samples(operator: Operator, place: Place) -> Iterator[Case]:
    assert operator.samples is not None
    for sample in operator.samples(place.dtype, place.device, torch.Generator().manual_seed(0)):
        if sample.serving:
            tokens = operator.workload(*operator.bind(sample.args, {})).tokens
            yield Case(operator.name, sample.label, tokens, 0, lambda args=sample.args: args)  # type: ignore[misc]
