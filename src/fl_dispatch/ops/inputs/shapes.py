"""Shapes that benchmarks measure, taken from served models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..declaration import Place, Shape, Shapes

WEIGHTS = ((1024, 1024), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Columns and inner sizes of products: a small product, and those in a layer of Llama-3.1-8B."""
FEW_ROWS = (1, 2, 8, 32)
QUANTIZED_ROWS = (1, 8, 32, 256, 4096)
QUANTIZED = {"int8": (torch.int8, 0), "fp8": (torch.float8_e4m3fn, 0), "fp8 blocks": (torch.float8_e4m3fn, 128)}
"""Type of both sides of a product, and the side of a block with one scale."""
GROUP = 128
"""Elements that share a scale, in rows and in 4-bit weights."""
HEADS, HEAD_DIM, KV_HEADS, BLOCK_SIZE = 32, 128, 8, 16
DECODE = ((1, 1024), (1, 8192), (8, 1024), (8, 8192), (32, 1024), (32, 4096), (128, 1024), (128, 4096))
"""Requests and keys of each. In total at most 32 times as many keys as the largest number of tokens."""
PREFILL = ((4, 512), (1, 2048), (4, 2048), (1, 8192), (4, 4096))
"""Requests and tokens of each; in total at most the largest number of tokens."""
LEAST_TOKENS = 32
"""Fewest tokens for which attention is measured."""
MOST_POSITIONS = 32768
"""Rows of the table of cosines and sines."""
EXPERTS = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "DeepSeek-V2-Lite": (64, 6, 2048, 1408)}
"""Experts, choices of a token, hidden size, inner size."""
LATENT_RANK, LATENT_ROPE, LATENT_DIM, LATENT_BLOCK_SIZE = 512, 64, 128, 64
LATENT_DECODE = ((1, 1024), (1, 8192), (8, 4096), (32, 4096), (128, 2048))
LATENT_HEADS = (16, 128)

Make = Callable[[Place, int, int], tuple[Any, ...]]
"""Place, tokens and width → arguments."""


def _each(label: str, tokens: Sequence[int], widths: Sequence[int], make: Make) -> Iterator[Shape]:
    for width in widths:
        for count in tokens:
            yield Shape(label, count, width, lambda place, t=count, w=width: make(place, t, w))  # type: ignore[misc]


def rows(**variants: Make) -> Shapes:
    """Return shapes of a row-wise operator for each number of tokens and hidden size, in variants by label."""

    def shapes(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
        for label, make in variants.items():
            yield from _each(label.replace("_", " ").strip(), tokens, hidden, make)

    return shapes


gated = rows(_=lambda place, tokens, width: (place.normal(tokens, 2 * width),))


def normalize(place: Place, tokens: int, hidden: int) -> tuple[Any, ...]:
    """Make arguments of a norm without a residual."""
    return place.normal(tokens, hidden), None, place.normal(hidden), 1e-6


def add_and_normalize(place: Place, tokens: int, hidden: int) -> tuple[Any, ...]:
    """Make arguments of a norm with a residual."""
    return place.normal(tokens, hidden), place.normal(tokens, hidden), place.normal(hidden), 1e-6


def normalize_heads(place: Place, tokens: int, heads: int, head_dim: int) -> tuple[Any, ...]:
    """Make arguments of a norm of every head."""
    return place.normal(tokens, heads, head_dim), None, place.normal(head_dim), 1e-6


norm = rows(_=normalize, with_residual=add_and_normalize)


def normalize_and_quantize(place: Place, tokens: int, hidden: int, *how: int) -> tuple[Any, ...]:
    """Make arguments of a norm with a residual and a quantized result."""
    x, residual, weight, epsilon = add_and_normalize(place, tokens, hidden)
    return x, "float8_e4m3fn", residual, weight, epsilon, *how


def gate_and_quantize(place: Place, tokens: int, width: int, *how: int) -> tuple[Any, ...]:
    """Make arguments of a gated activation with a quantized result."""
    return place.normal(tokens, 2 * width), "float8_e4m3fn", *how


quantized_norm = rows(_=normalize_and_quantize, groups=lambda *place: normalize_and_quantize(*place, GROUP))
quantized_gated = rows(_=gate_and_quantize, groups=lambda *place: gate_and_quantize(*place, GROUP))


def multiply(columns: int) -> Make:
    """Make arguments of a product with ``columns`` columns of weights; the width is the inner size."""
    return lambda place, tokens, inner: (place.normal(tokens, inner), place.normal(columns, inner, scale=inner**-0.5))


def products(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``linear``: few rows, as in decoding."""
    for columns, inner in WEIGHTS:
        few = [rows for rows in FEW_ROWS if rows <= max(tokens)]
        yield from _each(f"{columns} columns", few, (inner,), multiply(columns))


def multiply_scaled(columns: int, kind: torch.dtype, block: int) -> Make:
    """Make arguments of a product with ``columns`` columns of weights, both sides quantized."""

    def make(place: Place, tokens: int, inner: int) -> tuple[Any, ...]:
        down, across = (-(-columns // block), -(-inner // block)) if block else (columns, 1)
        x, weight = (place.normal(rows, inner, scale=32.0).to(kind) for rows in (tokens, columns))
        weights = _scales(place, down, across)
        dtype = str(place.dtype).removeprefix("torch.")
        return x, _scales(place, tokens, across), weight, weights, None, dtype, block

    return make


def _scales(place: Place, *shape: int) -> Tensor:
    return place.normal(*shape, scale=1e-3, dtype=torch.float32).abs_()


def quantized_products(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``scaled_linear``: decoding, and prompts."""
    some = [rows for rows in QUANTIZED_ROWS if rows <= max(tokens)]
    for label, (kind, block) in QUANTIZED.items():
        for columns, inner in WEIGHTS:
            yield from _each(f"{label}, {columns} columns", some, (inner,), multiply_scaled(columns, kind, block))


def multiply_weight_only(
    columns: int, kind: torch.dtype = torch.uint8, group: int = GROUP, zeros: bool = False
) -> Make:
    """Make arguments of a product with ``columns`` columns of quantized weights, with groups or (0) a scale per row."""

    def make(place: Place, tokens: int, inner: int) -> tuple[Any, ...]:
        return place.normal(tokens, inner), *_weight_only(place, (columns,), inner, kind, group, zeros)

    return make


def _weight_only(
    place: Place, rows: tuple[int, ...], inner: int, kind: torch.dtype, group: int, zeros: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    packed, groups = kind is torch.uint8, max(1, inner // group) if group else 1
    numbers = place.normal(*rows, inner // 2 if packed else inner, scale=64.0 if packed else 32.0)
    weight = numbers.abs_().to(kind) if packed else numbers.to(kind)
    zero = place.normal(*rows, groups).abs_().to(torch.int8) if zeros else None
    return weight, place.normal(*rows, groups, scale=1e-2), zero


def packed_products(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``weight_only_linear`` with 4 bits."""
    some = [rows for rows in QUANTIZED_ROWS if rows <= max(tokens)]
    for columns, inner in WEIGHTS:
        yield from _each(f"4 bits, {columns} columns", some, (inner,), multiply_weight_only(columns))


def fuse(columns: int, kind: torch.dtype | None, group: int, norm: bool, gated: bool) -> Make:
    """Make arguments of a fused product with ``columns`` columns; ``kind`` and ``group`` of quantized weights."""

    def make(place: Place, tokens: int, inner: int) -> tuple[Any, ...]:
        weight: tuple[Any, ...] = place.normal(columns, inner, scale=inner**-0.5), None, None
        if kind is not None:
            weight = _weight_only(place, (columns,), inner, kind, group, False)
        before = (place.normal(inner), place.normal(tokens, inner)) if norm else (None, None)
        return place.normal(tokens, inner), *weight, None, *before, 1e-6, gated

    return make


FUSED: dict[str, tuple[torch.dtype | None, int, bool]] = {
    "norm": (None, 0, True),
    "fp8": (torch.float8_e4m3fn, 0, False),
    "norm, 4 bits": (torch.uint8, GROUP, True),
}
"""Type of weights, elements that share a scale, and whether a norm comes first, as engines use them."""


def fused_products(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``fused_linear``: one row, and the two products of a layer of Llama-3.1-8B that follow a norm."""
    for label, (kind, group, norm) in FUSED.items():
        yield from _each(f"{label}, 6144 columns", (1,), (4096,), fuse(6144, kind, group, norm, False))
        yield from _each(f"{label}, 28672 columns, gated", (1,), (4096,), fuse(28672, kind, group, norm, True))


def rotate(
    place: Place, tokens: int, hidden: int, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, part: int = 0
) -> tuple[Any, ...]:
    """Return queries and keys as slices of one projection; ``part`` elements of a head are rotated, by default all."""
    heads, part = hidden // head_dim, part or head_dim
    projection = place.normal(tokens, heads + 2 * kv_heads, head_dim)
    query, key, _ = torch.tensor_split(projection, (heads, heads + kv_heads), dim=1)
    device = place.index_device
    frequencies = 10000.0 ** -(torch.arange(0, part, 2, device=device) / part)
    angles = torch.outer(torch.arange(max(tokens, MOST_POSITIONS), device=device), frequencies)
    cos, sin = place.floating(torch.cat((angles.cos(), angles.sin()), -1)).chunk(2, -1)
    return query, key, cos, sin, torch.arange(tokens, device=device)


rotary = rows(_=rotate)


def _caches(place: Place, blocks: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return caches in vLLM's layout: ``[blocks, kv_heads, block_size, key and value]`` in memory."""
    values = place.normal(blocks, kv_heads, BLOCK_SIZE, 2 * head_dim).transpose(1, 2)
    return values[..., :head_dim], values[..., head_dim:]


def write(place: Place, tokens: int, width: int, head_dim: int = HEAD_DIM) -> tuple[Any, ...]:
    """Make keys and values of new tokens, ``width`` elements each, and a cache with room for them."""
    kv_heads = width // head_dim
    key, value = place.normal(tokens, 2 * kv_heads, head_dim).chunk(2, dim=1)
    blocks, device = -(-tokens // BLOCK_SIZE) + 1, place.index_device
    pages = torch.randperm(blocks, device=device).repeat_interleave(BLOCK_SIZE) * BLOCK_SIZE
    slots = (pages + torch.arange(BLOCK_SIZE, device=device).repeat(blocks))[:tokens]
    return key, value, *_caches(place, blocks, kv_heads, head_dim), slots


def cache_writes(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``kv_cache_write``."""
    yield from _each("", tokens, (KV_HEADS * HEAD_DIM,), write)


def rotate_and_write(place: Place, tokens: int, hidden: int) -> tuple[Any, ...]:
    """Make queries, keys and values as slices of one projection, and a cache with room for them."""
    query, key, cos, sin, positions = rotate(place, tokens, hidden)
    _, value, *caches, slots = write(place, tokens, KV_HEADS * HEAD_DIM)
    return query, key, value, cos, sin, positions, *caches, slots


rotated_writes = rows(_=rotate_and_write)


def _pages(place: Place, requests: int, context: int, block_size: int) -> Tensor:
    blocks = -(-context // block_size)
    return torch.randperm(requests * blocks, device=place.index_device).to(torch.int32).view(requests, blocks)


def _steps(place: Place, requests: int, step: int) -> Tensor:
    return torch.arange(requests + 1, device=place.index_device, dtype=torch.int32) * step


def _lengths(place: Place, requests: int, context: int) -> Tensor:
    return torch.full((requests,), context, device=place.index_device, dtype=torch.int32)


def attend(
    place: Place,
    requests: int,
    new: int,
    context: int,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
) -> tuple[Any, ...]:
    """Make requests with ``new`` new tokens each, the last ones of ``context``."""
    table = _pages(place, requests, context, BLOCK_SIZE)
    query = place.normal(requests * new, heads, head_dim)
    caches = _caches(place, table.numel(), kv_heads, head_dim)
    starts, lengths = _steps(place, requests, new), _lengths(place, requests, context)
    return query, *caches, table, starts, lengths, new, context, head_dim**-0.5, place.normal(*query.shape)


def attend_batch(
    place: Place, queries: Sequence[int], longest: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Any, ...]:
    """Make requests with ``queries`` new tokens and no others, for any announced number of keys."""
    lengths = torch.tensor(queries, dtype=torch.int32, device=place.index_device)
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    table = lengths.new_zeros(len(queries), -(-longest // BLOCK_SIZE))
    caches = _caches(place, -(-max(queries) // BLOCK_SIZE), kv_heads, head_dim)
    query = place.normal(sum(queries), heads, head_dim)
    out = place.normal(*query.shape)
    return query, *caches, table, starts, lengths, max(queries), longest, head_dim**-0.5, out


def _decodes(prefix: str, shapes: Sequence[tuple[int, int]], most: int, make: Make) -> Iterator[Shape]:
    for batch, context in shapes:
        if batch * context <= LEAST_TOKENS * max(LEAST_TOKENS, most):
            yield from _each(f"{prefix}{batch} requests", (batch,), (context,), make)


def _prefills(most: int, make: Make) -> Iterator[Shape]:
    """Return shapes of prompts; ``make`` takes the number of requests and the tokens of each."""
    for batch, length in PREFILL:
        if batch * length <= max(LEAST_TOKENS, most):
            yield Shape(
                f"prefill, {batch} requests", batch * length, length,
                lambda place, b=batch, n=length: make(place, b, n),  # type: ignore[misc]
            )  # fmt: skip


def attention(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``paged_attention``: decoding, and whole prompts."""
    yield from _decodes("decode, ", DECODE, max(tokens), lambda place, batch, n: attend(place, batch, 1, n))
    yield from _prefills(max(tokens), lambda place, batch, n: attend(place, batch, n, n))


def latent(heads: int) -> Make:
    """Make arguments of latent decoding with ``heads`` heads: requests, and keys of each."""

    def make(place: Place, requests: int, context: int) -> tuple[Any, ...]:
        width, scale = LATENT_RANK + LATENT_ROPE, (LATENT_DIM + LATENT_ROPE) ** -0.5
        table = _pages(place, requests, context, LATENT_BLOCK_SIZE)
        cache, query = (
            place.normal(table.numel(), LATENT_BLOCK_SIZE, width),
            place.normal(requests, heads, width),
        )
        starts, lengths = _steps(place, requests, 1), _lengths(place, requests, context)
        out = place.normal(requests, heads, LATENT_RANK)
        return query, cache, table, starts, lengths, 1, context, scale, LATENT_RANK, out

    return make


def latent_decode(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``mla_decode``."""
    for heads in LATENT_HEADS:
        yield from _decodes(f"decode, {heads} heads, ", LATENT_DECODE, max(tokens), latent(heads))


def attend_in_full(place: Place, requests: int, length: int, heads: int = LATENT_HEADS[0]) -> tuple[Any, ...]:
    """Make prompts of latent attention, with keys and values for every head."""
    tokens, width = requests * length, LATENT_DIM + LATENT_ROPE
    value = place.normal(tokens, heads, 2 * LATENT_DIM)[..., LATENT_DIM:]  # a view next to the keys' larger part
    starts, query, key = _steps(place, requests, length), *(place.normal(tokens, heads, width) for _ in range(2))
    return query, key, value, starts, starts, length, length, width**-0.5


def latent_prefill(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``mla_prefill``."""
    yield from _prefills(max(tokens), attend_in_full)


INDEX_HEADS = 64
"""Index heads of DeepSeek-V3.2."""
INDEX_DIM = 128
"""Elements of an index key of DeepSeek-V3.2."""
INDEX_TOPK = 2048
"""Tokens that a query of DeepSeek-V3.2 attends to."""
SPARSE_DECODE = ((1, 4096), (1, 32768), (1, 131072), (8, 32768))


def list_tokens(place: Place, requests: int, context: int, new: int = 1) -> tuple[Any, ...]:
    """Make index queries of ``new`` tokens per request, over index keys in fp8."""
    table = _pages(place, requests, context, LATENT_BLOCK_SIZE)
    blocks, tokens = table.numel(), requests * new
    cache = place.normal(blocks, LATENT_BLOCK_SIZE, INDEX_DIM).to(torch.float8_e4m3fn)
    scales = place.normal(blocks, LATENT_BLOCK_SIZE, 1, dtype=torch.float32).abs()
    query = place.normal(tokens, INDEX_HEADS, INDEX_DIM)
    weights = place.normal(tokens, INDEX_HEADS, dtype=torch.float32)
    starts, lengths = _steps(place, requests, new), _lengths(place, requests, context)
    return query, weights, cache, table, starts, lengths, new, context, INDEX_TOPK, None, scales


def index_topk(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``index_topk``."""
    yield from _decodes("decode, ", SPARSE_DECODE, max(tokens), list_tokens)
    yield from _prefills(max(tokens), lambda place, batch, n: list_tokens(place, batch, n, n))


def attend_to_listed(place: Place, requests: int, context: int, new: int = 1) -> tuple[Any, ...]:
    """Make latent queries of ``new`` tokens per request, and random lists of cached tokens."""
    query, cache, table, starts, _, _, _, scale, rank, _ = latent(LATENT_HEADS[-1])(place, requests, context)
    if new > 1:
        query, starts = place.normal(requests * new, *query.shape[1:]), _steps(place, requests, new)
    listed = min(INDEX_TOPK, context)
    lists = torch.rand(requests * new, context, device=place.index_device).topk(listed, dim=-1).indices.sort().values
    return query, cache, lists.int(), table, starts, new, scale, rank


def sparse_latent(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``mla_sparse``."""
    yield from _decodes("decode, ", SPARSE_DECODE, max(tokens), attend_to_listed)
    yield from _prefills(max(tokens), lambda place, batch, n: attend_to_listed(place, batch, n, n))


MAIN_MEMORY = torch.device("cpu")
DELTA_HEADS = {"Qwen3-Next-80B-A3B": (16, 32), "Qwen3.5-0.8B": (16, 16)}
"""Key and value heads of two models with the gated delta rule."""
DELTA_DIM = 128
"""Elements of a head of these models."""
CONV_WIDTH = 4
"""Taps of the convolution of these models."""


def _channels(heads: tuple[int, int]) -> int:
    key_heads, value_heads = heads
    return (2 * key_heads + value_heads) * DELTA_DIM


def _convolution(place: Place, rows: int, requests: int, channels: int) -> tuple[Any, ...]:
    """Make ``x``, weights, states and slots."""
    states = place.normal(requests + 1, CONV_WIDTH - 1, channels).transpose(1, 2)
    slots = _slots(place, requests)
    return place.normal(rows, channels), place.normal(channels, CONV_WIDTH, scale=0.5), None, states, slots


def _slots(place: Place, requests: int) -> Tensor:
    """Return a slot for each request; slot 0 belongs to no request, as in hosts."""
    return 1 + torch.randperm(requests, device=place.index_device).to(torch.int32)


def convolve(place: Place, requests: int, length: int, channels: int) -> tuple[Any, ...]:
    """Make prompts of a short convolution, all of them new."""
    starts = _steps(place, requests, length)
    has_state = torch.zeros(requests, dtype=torch.bool, device=place.index_device)
    return *_convolution(place, requests * length, requests, channels), starts, has_state


def convolve_tokens(place: Place, requests: int, channels: int) -> tuple[Any, ...]:
    """Make one token per request for a short convolution."""
    return _convolution(place, requests, requests, channels)


def convolutions(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``causal_conv1d``."""
    for model, heads in DELTA_HEADS.items():
        channels = _channels(heads)
        for shape in _prefills(max(tokens), lambda place, batch, n, c=channels: convolve(place, batch, n, c)):  # type: ignore[misc]
            yield replace(shape, label=f"{model}, {shape.label}")


def convolution_updates(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``causal_conv1d_update``."""
    for model, heads in DELTA_HEADS.items():
        yield from _each(model, _requests(tokens), (_channels(heads),), convolve_tokens)


def _requests(tokens: Sequence[int]) -> list[int]:
    return [count for count in (1, 8, 32, 128) if count <= max(LEAST_TOKENS, *tokens)]


def _delta(place: Place, rows: int, requests: int, heads: tuple[int, int]) -> tuple[Any, ...]:
    """Make queries, keys and values as slices of one product, gates, decays, states and slots."""
    key_heads, value_heads = heads
    sizes = [count * DELTA_DIM for count in (key_heads, *heads)]
    parts = torch.split(place.normal(rows, _channels(heads)), sizes, dim=1)
    by_head = (part.view(rows, -1, DELTA_DIM) for part in parts)
    a, b = (place.normal(rows, value_heads) for _ in range(2))
    decays = (place.normal(value_heads, dtype=torch.float32) for _ in range(2))
    states = place.normal(requests + 1, value_heads, DELTA_DIM, DELTA_DIM, dtype=torch.float32)
    if place.index_device != MAIN_MEMORY:  # in hosts the keys of a value are contiguous here
        states = states.transpose(2, 3)
    return *by_head, a, b, *decays, states, _slots(place, requests)


def correct(place: Place, requests: int, length: int, heads: tuple[int, int]) -> tuple[Any, ...]:
    """Make prompts of the gated delta rule, all of them new."""
    has_state = torch.zeros(requests, dtype=torch.bool, device=place.index_device)
    parts, starts = _delta(place, requests * length, requests, heads), _steps(place, requests, length)
    return *parts, starts, has_state, DELTA_DIM**-0.5


def correct_tokens(place: Place, requests: int, heads: tuple[int, int]) -> tuple[Any, ...]:
    """Make one token per request for the gated delta rule."""
    return *_delta(place, requests, requests, heads), DELTA_DIM**-0.5


def delta_rules(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``gated_delta_rule``."""
    for model, heads in DELTA_HEADS.items():
        for shape in _prefills(max(tokens), lambda place, batch, n, h=heads: correct(place, batch, n, h)):  # type: ignore[misc]
            yield replace(shape, label=f"{model}, {shape.label}")


def delta_updates(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``gated_delta_rule_update``."""
    for model, heads in DELTA_HEADS.items():
        width = heads[1] * DELTA_DIM
        yield from _each(model, _requests(tokens), (width,), lambda place, n, _, h=heads: correct_tokens(place, n, h))  # type: ignore[misc]


SPACES = {
    "Mamba2-2.7B": (80, 1, 64, 128),
    "NVIDIA-Nemotron-Nano-9B-v2": (128, 8, 64, 128),
    "mamba-2.8b": (5120, 1, 1, 16),
}
"""Heads and groups of models with state spaces, the size of a head, and the size of a state; heads of size one have a
decay for each column."""


def _space(place: Place, rows: int, requests: int, sizes: tuple[int, int, int, int]) -> tuple[Any, ...]:
    """Make tokens, steps, decays, inputs and outputs of a state, a head's parameters, states and slots."""
    count, groups, head_dim, state_size = sizes
    x, dt = place.normal(rows, count, head_dim), place.normal(rows, count)
    b, c = (place.normal(rows, groups, state_size) for _ in range(2))
    decays = (count, state_size) if head_dim == 1 else (count,)
    a, parameters = -place.normal(*decays, dtype=torch.float32).exp(), (place.normal(count) for _ in range(2))
    states = place.normal(requests, count, head_dim, state_size, dtype=torch.float32)
    slots = torch.randperm(requests, device=place.index_device).to(torch.int32)
    return x, dt, a, b, c, *parameters, states, slots


def scan(place: Place, requests: int, length: int, sizes: tuple[int, int, int, int]) -> tuple[Any, ...]:
    """Make prompts of a state space, all of them new."""
    has_state = torch.zeros(requests, dtype=torch.bool, device=place.index_device)
    parts, starts = _space(place, requests * length, requests, sizes), _steps(place, requests, length)
    return *parts, starts, has_state


def scans(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``selective_scan``."""
    for model, sizes in SPACES.items():
        for shape in _prefills(max(tokens), lambda place, batch, n, s=sizes: scan(place, batch, n, s)):  # type: ignore[misc]
            yield replace(shape, label=f"{model}, {shape.label}")


def state_updates(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``selective_state_update``."""
    for model, sizes in SPACES.items():
        width = sizes[0] * sizes[2]
        yield from _each(model, _requests(tokens), (width,), lambda place, n, _, s=sizes: _space(place, n, n, s))  # type: ignore[misc]


def _routed(place: Place, tokens: int, experts: int, topk: int) -> tuple[Tensor, Tensor]:
    weights, ids = torch.randn(tokens, experts, device=place.index_device).softmax(-1).topk(topk)
    return weights, ids.to(torch.int32)


def mix(experts: int, topk: int, inner: int) -> Make:
    """Make arguments of a mixture of experts."""

    def make(place: Place, tokens: int, hidden: int) -> tuple[Any, ...]:
        weights = place.normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
        down = place.normal(experts, hidden, inner, scale=inner**-0.5)
        return place.normal(tokens, hidden), weights, down, *_routed(place, tokens, experts, topk)

    return make


def mixture(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``fused_moe``, from two models."""
    for model, (experts, topk, width, inner) in EXPERTS.items():
        yield from _each(model, tokens, (width,), mix(experts, topk, inner))


def mix_scaled(experts: int, topk: int, inner: int, kind: torch.dtype, block: int) -> Make:
    """Make arguments of a mixture of experts with both sides of its products quantized."""

    def make(place: Place, tokens: int, hidden: int) -> tuple[Any, ...]:
        def weight(columns: int, width: int) -> tuple[Tensor, Tensor]:
            down, across = (-(-columns // block), -(-width // block)) if block else (columns, 1)
            numbers = place.normal(experts, columns, width, scale=32.0).to(kind)
            return numbers, _scales(place, experts, down, across)

        routed = _routed(place, tokens, experts, topk)
        rest = ("silu", False, None, None, None, None, None, block)
        return place.normal(tokens, hidden), *weight(2 * inner, hidden), *weight(hidden, inner), *routed, *rest

    return make


def scaled_mixture(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``scaled_moe``, like those of ``fused_moe``."""
    for label, (kind, block) in QUANTIZED.items():
        for model, (experts, topk, width, inner) in EXPERTS.items():
            yield from _each(f"{label}, {model}", tokens, (width,), mix_scaled(experts, topk, inner, kind, block))


def mix_weight_only(
    experts: int, topk: int, inner: int, kind: torch.dtype = torch.uint8, group: int = GROUP, zeros: bool = False
) -> Make:
    """Make arguments of a mixture of experts with quantized weights."""

    def make(place: Place, tokens: int, hidden: int) -> tuple[Any, ...]:
        w13, scale13, zero13 = _weight_only(place, (experts, 2 * inner), hidden, kind, group, zeros)
        w2, scale2, zero2 = _weight_only(place, (experts, hidden), inner, kind, group, zeros)
        rest = ("silu", False, None, None, None, zero13, zero2) if zeros else ()
        return place.normal(tokens, hidden), w13, scale13, w2, scale2, *_routed(place, tokens, experts, topk), *rest

    return make


def packed_mixture(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``weight_only_moe`` with 4 bits, from the served models."""
    for model, (experts, topk, width, inner) in EXPERTS.items():
        yield from _each(f"4 bits, {model}", tokens, (width,), mix_weight_only(experts, topk, inner))


def routing(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``topk_softmax`` and ``topk_sigmoid``."""
    experts, topk, *_ = EXPERTS["Qwen3-30B-A3B"]
    yield from _each("", tokens, (experts,), lambda place, t, e: (place.normal(t, e), topk, True))


def route_in_groups(place: Place, tokens: int, experts: int) -> tuple[Any, ...]:
    """Make logits of experts in groups."""
    bias = place.normal(experts, scale=0.1, dtype=torch.float32)
    return place.normal(tokens, experts), 8, 8, 4, True, "sigmoid", 2.5, bias


def grouped_routing(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``grouped_topk``, with the routing of DeepSeek-V3."""
    yield from _each("", tokens, (256,), route_in_groups)


def align(topk: int) -> Make:
    """Make choices of experts with a block size that fits their number; the width is the number of experts."""

    def make(place: Place, tokens: int, experts: int) -> tuple[Any, ...]:
        return _routed(place, tokens, experts, topk)[1], 64 if tokens * topk > 16 * experts else 16, experts

    return make


def alignment(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``moe_align_block_size``."""
    experts, topk, *_ = EXPERTS["Qwen3-30B-A3B"]
    yield from _each("", tokens, (experts,), align(topk))


def expert_sums(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    """Shapes of ``moe_sum``."""
    _, topk, width, _ = EXPERTS["Qwen3-30B-A3B"]
    yield from _each("", tokens, (width,), lambda place, t, h: (place.normal(t, topk, h),))
