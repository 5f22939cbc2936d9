"""Inputs of operators on a paged key-value cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..declaration import Sample
from ..quantization import FP8, LARGEST
from .quantized import TieFree, none_and_infinite
from .source import Source, starts

HIDDEN_BLOCKS = 2
"""Blocks of NaN after the view of a cache, to which unused entries of the table point. Reading them does not crash,
because they belong to the same tensor, but the result is wrong."""
SCALES = (0.03, 0.02)
"""Scales of the keys and values of an fp8 cache, with which its largest numbers are about 13 and 9."""
SCALE_ELEMENTS = torch.float32.itemsize
"""Elements of an int8 cache that a scale takes after each head's numbers, as in hosts."""


def caches(values: Tensor, kv_heads: int, head_dim: int, block_size: int, layout: str) -> tuple[Tensor, Tensor]:
    """Return both caches as ``[blocks, block_size, kv_heads, dim]``, in one of the memory layouts of hosts."""
    if layout == "token-major":  # [blocks, block_size, kv_heads, dim], two tensors
        shaped = values.view(-1, block_size, kv_heads, values.shape[-1])
        key, value = torch.tensor_split(shaped, (head_dim,), dim=-1)
        return key.contiguous(), value.contiguous()
    if layout == "keys transposed":  # [blocks, kv_heads], then [head_dim, block_size] keys, [block_size, dim] values
        page = values.view(-1, kv_heads, block_size * values.shape[-1])
        key, value = torch.tensor_split(page, (head_dim * block_size,), dim=-1)
        key = key.view(len(page), kv_heads, head_dim, block_size).permute(0, 3, 1, 2)
        return key, value.view(len(page), kv_heads, block_size, -1).transpose(1, 2)
    # [blocks, kv_heads, block_size, dim], key and value next to each other in one tensor
    shaped = values.view(-1, kv_heads, block_size, values.shape[-1]).transpose(1, 2)
    key, value = torch.tensor_split(shaped, (head_dim,), dim=-1)
    return key, value


def int8_caches(
    source: Source, blocks: int, kv_heads: int, dims: tuple[int, int], block_size: int, layout: str
) -> tuple[Tensor, ...]:
    """Return both int8 caches, then their scales: in the caches' memory after each head's numbers, or separate.

    Numbers are no larger than those of :meth:`Source.normal`, for which the tolerances of a mean hold.
    """
    scale_elements = 0 if layout == "keys transposed" else SCALE_ELEMENTS
    shape = (blocks * kv_heads * block_size, sum(dims) + 2 * scale_elements)
    numbers = torch.randint(-127, 128, shape, generator=source.generator).to(source.device, torch.int8)
    found, scales = [], []
    for cache, dim in zip(caches(numbers, kv_heads, dims[0] + scale_elements, block_size, layout), dims, strict=True):
        drawn = (source.normal(blocks, block_size, kv_heads).abs().float() / 2 + 1) / 127
        if scale_elements:
            inside = cache[..., dim:].view(torch.float32).squeeze(-1)
            drawn = inside.copy_(drawn)
        found.append(cache[..., :dim])
        scales.append(drawn)
    return *found, *scales


def _given(scales: tuple[float, float] | None, token_scales: Sequence[Tensor]) -> tuple[object, ...]:
    """Return the last arguments of a call."""
    return (None, None, *token_scales) if token_scales else scales or ()


class Writes(Source):
    """Source of inputs of ``kv_cache_write``."""

    def sample(
        self,
        label: str,
        tokens: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        blocks: int = 24,
        block_size: int = 16,
        layout: str = "head-major",
        consecutive: bool = False,
        skip: Sequence[int] = (),
        padding: int = 0,
        scales: tuple[float, float] | None = None,
        exact: bool = False,
        int8: bool = False,
        extreme: bool = False,
        serving: bool = True,
    ) -> Sample:
        value_dim = value_dim or head_dim
        # As in hosts, key and value are views of one projection.
        rows = tokens + padding
        if int8:
            rounded = TieFree(self.dtype, self.device, self.generator, torch.int8, LARGEST["int8"])
            parts = [rounded.rows(rows * kv_heads, dim) for dim in (head_dim, value_dim)]
            projection = torch.cat(parts, -1).view(rows, kv_heads, head_dim + value_dim)
        elif scales is None:
            projection = self.normal(rows, kv_heads, head_dim + value_dim)
        else:
            source = TieFree(self.dtype, self.device, self.generator, FP8, torch.finfo(FP8).max)
            draw = source.exact if exact else source.with_scale
            parts = [draw(rows * kv_heads, *of) for of in zip((head_dim, value_dim), scales, strict=True)]
            projection = torch.cat(parts, -1).view(rows, kv_heads, head_dim + value_dim)
        if extreme:
            projection = none_and_infinite(projection.flatten(1), head_dim).view_as(projection)
        key, value = torch.tensor_split(projection, (head_dim,), dim=-1)
        token_scales: Sequence[Tensor] = ()
        if int8:
            stored = int8_caches(self, blocks, kv_heads, (head_dim, value_dim), block_size, layout)
            key_cache, value_cache, *token_scales = stored
        else:
            values = self.normal(blocks * kv_heads * block_size, head_dim + value_dim)
            values = values if scales is None else values.to(FP8)
            key_cache, value_cache = caches(values, kv_heads, head_dim, block_size, layout)
        free = blocks * block_size
        slots = torch.arange(3, 3 + tokens) if consecutive else torch.randperm(free, generator=self.generator)[:tokens]
        slots[list(skip)] = -1
        args = (key, value, key_cache, value_cache, slots.to(self.device))
        return Sample(label, (*args, *_given(scales, token_scales)), serving)


def write_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``kv_cache_write``."""
    sample = Writes(dtype, device, generator).sample
    yield sample("decode, 32 tokens", 32, 8, 128)
    yield sample("prefill, 200 tokens", 200, 4, 64, consecutive=True)
    yield sample("token-major cache", 33, 2, 80, layout="token-major")
    yield sample("padded and skipped tokens", 12, 4, 64, skip=(0, 7, 11), padding=4)
    yield sample("keys transposed, block size 32", 33, 2, 64, block_size=32, layout="keys transposed")
    yield sample("keys transposed, head size 80", 21, 2, 80, layout="keys transposed", skip=(5,), padding=2)
    yield sample("latent cache, 512 and 64 elements", 33, 1, 512, 64)
    yield sample("fp8 cache, decode", 32, 8, 128, scales=SCALES)
    yield sample("fp8 cache, token-major", 17, 2, 80, layout="token-major", skip=(3,), padding=2, scales=SCALES)
    yield sample("fp8 cache, keys transposed", 21, 2, 64, block_size=32, layout="keys transposed", scales=(1.0, 0.5))
    yield sample("fp8 cache, value narrower than key", 9, 2, 96, 64, scales=SCALES, serving=False)
    yield sample("fp8 cache, latent, 512 and 64 elements", 33, 1, 512, 64, scales=(SCALES[0], SCALES[0]))
    yield sample("fp8 cache, nothing to round", 9, 2, 96, 64, skip=(1,), scales=(0.25, 0.5), exact=True, serving=False)
    yield sample("fp8 cache, NaN and infinities", 9, 2, 64, scales=SCALES, extreme=True, serving=False)
    yield sample("fp8 cache, empty batch", 0, 2, 64, scales=SCALES, serving=False)
    yield sample("int8 cache, decode", 32, 8, 128, int8=True)
    yield sample("int8 cache, token-major", 17, 2, 80, layout="token-major", skip=(3,), padding=2, int8=True)
    yield sample("int8 cache, scales apart", 21, 2, 64, block_size=32, layout="keys transposed", int8=True)
    yield sample("int8 cache, value narrower than key", 9, 3, 96, 64, skip=(1,), int8=True, serving=False)
    yield sample("int8 cache, NaN and infinities", 9, 2, 64, int8=True, extreme=True, serving=False)
    yield sample("int8 cache, empty batch", 0, 2, 64, int8=True, serving=False)
    yield sample("NaN and infinities", 9, 2, 64, extreme=True, serving=False)
    yield sample("value narrower than key", 9, 2, 96, 64, serving=False)
    yield sample("block size 1", 9, 2, 64, blocks=32, block_size=1, layout="token-major", serving=False)
    yield sample("one token", 1, 1, 64, serving=False)
    yield sample("only skipped tokens", 2, 1, 64, skip=(0, 1), serving=False)
    yield sample("empty batch", 0, 2, 64, serving=False)


def write_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``kv_cache_write``: many tokens and many blocks."""
    sample = Writes(dtype, device, generator).sample
    yield sample("8,200 tokens", 8200, 1, 32, blocks=520, consecutive=True, serving=False)
    yield sample("5,000 tokens, block size 128", 5000, 2, 16, blocks=48, block_size=128, serving=False)


class _Attention(Source):
    """Source of inputs of ``paged_attention``."""

    def sample(
        self,
        label: str,
        requests: Sequence[tuple[int, int]],
        heads: tuple[int, int],
        head_dim: int,
        value_dim: int | None = None,
        *,
        block_size: int = 16,
        layout: str = "head-major",
        padding: int | None = None,
        causal: bool = True,
        window: int | None = None,
        softcap: float = 0.0,
        alibi: bool = False,
        sinks: bool = False,
        scales: tuple[float, float] | None = None,
        int8: bool = False,
        spare: int = 0,
        hostile: bool = False,
        serving: bool = True,
    ) -> Sample:
        """Make a sample: ``requests`` are (new tokens, all tokens), and ``padding`` adds rows to a given ``out``.

        With ``spare`` the maxima are ``spare`` blocks larger than needed. A ``hostile`` input has NaN in every slot
        without a token (for int8, in its scale), and table entries that no visible key needs point outside the cache.
        """
        value_dim = value_dim or head_dim
        queries, lengths = [new for new, _ in requests], [length for _, length in requests]
        blocks = [-(-length // block_size) for length in lengths]
        hidden = HIDDEN_BLOCKS if hostile else 0
        free = 1 + sum(blocks)
        # Block 0 belongs to no request: hosts point unused entries of the table there.
        pages = 1 + self.order(sum(blocks))
        table = torch.full((len(requests), max(blocks, default=0) + 1 + spare), free if hostile else 0).int()
        for row, part in (
            zip(table, torch.tensor_split(pages, torch.tensor(blocks).cumsum(0)[:-1]), strict=True) if requests else ()
        ):
            row[: len(part)] = part
        tokens = sum(queries) + (padding or 0)
        if int8:
            stored = int8_caches(self, free + hidden, heads[1], (head_dim, value_dim), block_size, layout)
        else:
            values = self.normal((free + hidden) * heads[1] * block_size, head_dim + value_dim)
            if scales is not None:
                split = torch.tensor([scales[0]] * head_dim + [scales[1]] * value_dim, device=self.device)
                values = (values.float() / split).to(FP8)
            stored = caches(values, heads[1], head_dim, block_size, layout)
        if hostile:
            unused = ~used_slots(table, lengths, free + hidden, block_size).to(self.device)
            for cache in stored:
                if cache.dtype is not torch.int8:
                    cache.index_put_(unused.nonzero(as_tuple=True), cache.new_tensor(math.nan))
            stored = tuple(cache[:free] for cache in stored)
            for row, (new, length) in zip(table, requests, strict=True):  # blocks outside the window
                row[: max(0, length - new + 1 - (window or length + 1)) // block_size] = free
        key_cache, value_cache, *token_scales = stored
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads[0] + 1) / heads[0]) if alibi else None
        args = (
            self.normal(tokens, heads[0], head_dim),
            key_cache,
            value_cache,
            table.to(self.device),
            starts(queries).to(self.device),
            torch.tensor(lengths, dtype=torch.int32).to(self.device),
            max(queries, default=0) + (spare and 3),
            max(lengths, default=0) + spare * block_size,
            head_dim**-0.5,
            None if padding is None else self.normal(tokens, heads[0], value_dim),
            causal,
            window,
            softcap,
            None if slopes is None else slopes.to(self.device),
            self.normal(heads[0]) if sinks else None,
            *_given(scales, token_scales),
        )
        return Sample(label, args, serving)


def used_slots(table: Tensor, lengths: Sequence[int], blocks: int, block_size: int) -> Tensor:
    """Return which slots hold a token of a request, ``[blocks, block_size]``; all tensors are on the CPU."""
    used = torch.zeros(blocks, block_size, dtype=torch.bool)
    for row, length in zip(table.long(), lengths, strict=True):
        used[row[: length // block_size]] = True
        if length % block_size:
            used[row[length // block_size], : length % block_size] = True
    return used


MIXED = ((1, 300), (1, 33), (70, 70), (17, 100), (1, 1))
DECODE = tuple((1, length) for length in (1, 16, 17, 64, 129, 256, 333, 512))


def attention_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``paged_attention``."""
    sample = _Attention(dtype, device, generator).sample
    decode, mixed = DECODE, MIXED
    yield sample("decode, 8 requests, GQA 4", decode, (32, 8), 128)
    yield sample("prefill, 2 requests, GQA 8", [(128, 128), (40, 40)], (16, 2), 64)
    yield sample("mixed batch, chunked prefill", mixed, (16, 4), 128)
    yield sample("head size 80, MHA, token-major cache", mixed[1:], (8, 8), 80, layout="token-major")
    yield sample("padded batch with out", [(1, 40), (5, 21), (0, 0)], (8, 2), 64, padding=3)
    yield sample("decode with out, block size 32", decode[:4], (8, 1), 128, block_size=32, padding=0)
    yield sample("sliding window 32", mixed, (8, 4), 64, window=32)
    yield sample("sliding window 24, softcap 30", mixed, (8, 4), 128, window=24, softcap=30.0)
    yield sample("sinks, sliding window 128", mixed[:3], (8, 1), 64, window=128, sinks=True)
    yield sample("alibi", mixed[1:], (8, 8), 64, alibi=True)
    yield sample("keys transposed, decode", decode, (16, 4), 128, block_size=32, layout="keys transposed", padding=0)
    yield sample("keys transposed, sliding window 24", mixed, (8, 4), 80, layout="keys transposed", window=24)
    apart = partial(sample, block_size=128, layout="token-major", padding=2)
    yield apart("blocks of 128, decode", decode, (16, 4), 128)
    yield apart("blocks of 128, mixed batch", [*mixed, (0, 0)], (8, 2), 64)
    yield apart("blocks of 128, decode, sliding window 200", decode, (8, 4), 64, window=200)
    yield apart("blocks of 128, sliding window 48", mixed, (8, 8), 64, window=48)
    yield apart("blocks of 128, not causal", mixed[1:4], (4, 2), 64, causal=False, serving=False)
    quantized = partial(sample, scales=SCALES)
    yield quantized("fp8 cache, decode", decode, (32, 8), 128)
    yield quantized("fp8 cache, mixed batch", mixed, (16, 4), 64, layout="token-major", padding=0)
    yield quantized("fp8 cache, keys transposed", decode[:5], (16, 4), 128, block_size=32, layout="keys transposed")
    yield quantized("fp8 cache, sliding window 24, softcap 30", mixed, (8, 4), 64, window=24, softcap=30.0)
    yield quantized("fp8 cache, alibi, sinks", mixed[1:4], (6, 3), 64, alibi=True, sinks=True, serving=False)
    yield quantized("fp8 cache, value narrower than key", mixed[1:], (4, 2), 96, 64, serving=False)
    quantized = partial(sample, int8=True)
    yield quantized("int8 cache, decode", decode, (32, 8), 128)
    yield quantized("int8 cache, mixed batch", mixed, (16, 4), 64, layout="token-major", padding=0)
    yield quantized("int8 cache, scales apart", decode[:5], (16, 4), 128, block_size=32, layout="keys transposed")
    yield quantized("int8 cache, sliding window 24, softcap 30", mixed, (8, 4), 64, window=24, softcap=30.0)
    yield quantized("int8 cache, alibi, sinks", mixed[1:4], (6, 3), 64, alibi=True, sinks=True, serving=False)
    yield quantized("int8 cache, value narrower than key", mixed[1:], (4, 2), 96, 64, serving=False)
    yield sample("not causal", [(20, 20), (7, 7)], (4, 2), 64, causal=False, serving=False)
    yield sample("not causal, sliding window 5", [(20, 20)], (4, 2), 64, causal=False, window=5, serving=False)
    yield sample("value narrower than key", mixed[1:], (4, 2), 96, 64, serving=False)
    yield sample("softcap 2, alibi, sinks", mixed[1:4], (6, 3), 64, softcap=2.0, alibi=True, sinks=True, serving=False)
    yield sample("one token", [(1, 1)], (4, 1), 64, serving=False)
    yield sample("sliding window 1", [(3, 9)], (4, 1), 64, window=1, serving=False)
    yield sample("empty batch", [], (4, 1), 64, serving=False)


def attention_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``paged_attention``: long contexts, too large maxima, unused memory that would spoil a result."""
    sample = _Attention(dtype, device, generator).sample
    long = ((1, 1025), (1, 2049), (5, 1300), (1, 4100))
    yield sample("decode, 1,025 to 4,100 keys", [(1, 1025), (1, 2049), (1, 4100)], (4, 1), 64, serving=False)
    yield sample("chunked prefill over 4,100 keys", long, (4, 2), 64, serving=False)
    yield sample("prefill, 1,100 tokens", [(1100, 1100)], (2, 1), 64, serving=False)
    yield sample("520 requests", [(1, 3)] * 520, (2, 1), 16, serving=False)
    yield sample("decode, maxima larger than needed", DECODE[:6], (8, 2), 64, spare=70, serving=False)
    yield sample("mixed batch, maxima larger than needed", MIXED, (8, 2), 64, spare=70, serving=False)
    yield sample("decode, NaN in unused slots", DECODE, (8, 2), 128, hostile=True, serving=False)
    yield sample("mixed batch, NaN in unused slots", MIXED, (8, 2), 64, hostile=True, spare=4, serving=False)
    yield sample("token-major cache, NaN in unused slots", MIXED, (4, 4), 80, layout="token-major", hostile=True,
                 serving=False)  # fmt: skip
    yield sample("keys transposed, NaN in unused slots", DECODE, (8, 2), 64, block_size=32, layout="keys transposed",
                 padding=0, hostile=True, serving=False)  # fmt: skip
    yield sample("fp8 cache, 4,100 keys, NaN in unused slots", [(1, 4100), (3, 9)], (4, 1), 64, hostile=True,
                 scales=SCALES, serving=False)  # fmt: skip
    yield sample("int8 cache, 4,100 keys, NaN in unused slots", [(1, 4100), (3, 9)], (4, 1), 64, hostile=True,
                 int8=True, serving=False)  # fmt: skip
    yield sample("sliding window 32, NaN in unused slots", MIXED, (8, 2), 64, window=32, hostile=True, serving=False)
