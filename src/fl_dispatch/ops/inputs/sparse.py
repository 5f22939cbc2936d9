"""Inputs of sparse latent attention.

Index scores are sums of small integers, so every implementation gets the same scores, and many are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..declaration import Sample
from ..quantization import FP8
from .latent import SCALE, Paged
from .paged import HIDDEN_BLOCKS, used_slots
from .source import starts

GROUP = 128
"""Elements of an index key that share a scale."""
LARGEST_INTEGER = 2
"""Largest magnitude of the integers in queries and keys."""
LARGEST_ROUNDED = 40
"""Largest magnitude of the integers in queries that are rounded to fp8; some are no numbers of it."""
DEEPSEEK_V3_2 = (64, 128)
"""Index heads of DeepSeek-V3.2, and their dimension."""
GLM_5 = (32, 128)
"""Index heads of GLM-5, and their dimension."""


class _Paged(Paged):
    """Source of paged caches and small integers."""

    def integers(self, *shape: int, largest: int = LARGEST_INTEGER) -> Tensor:
        """Return small integers around zero."""
        drawn = torch.randint(-largest, largest + 1, shape, generator=self.generator)
        return drawn.to(self.device, self.dtype)


class _Writes(_Paged):
    """Source of inputs of ``index_key_write``."""

    def sample(
        self,
        label: str,
        tokens: int,
        dim: int = 128,
        *,
        fp8: bool = True,
        block_size: int = 64,
        skip: Sequence[int] = (),
        padding: int = 0,
        beside: bool = False,
        serving: bool = True,
    ) -> Sample:
        """Make a sample; ``beside`` stores the scales of a block after its keys in the cache's memory, as hosts do."""
        key = self.normal(tokens + padding, dim + 32)[:, :dim]
        blocks, groups = -(-tokens // block_size) + 2, -(-dim // GROUP)
        slots = torch.randperm(blocks * block_size, generator=self.generator)[:tokens]
        slots[list(skip)] = -1
        if not fp8:
            return Sample(label, (key, self.normal(blocks, block_size, dim), slots.to(self.device)), serving)
        if beside:
            memory = torch.zeros(blocks, block_size * (dim + 4 * groups), dtype=torch.uint8, device=self.device)
            cache = memory[:, : block_size * dim].view(FP8).view(blocks, block_size, dim)
            scales = memory[:, block_size * dim :].view(torch.float32).view(blocks, block_size, groups)
        else:
            cache = torch.zeros(blocks, block_size, dim, device=self.device).to(FP8)
            scales = torch.zeros(blocks, block_size, groups, device=self.device)
        return Sample(label, (key, cache, slots.to(self.device), scales), serving)


def write_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``index_key_write``."""
    sample = _Writes(dtype, device, generator).sample
    yield sample("decode, 8 tokens, scales beside the keys", 8, beside=True)
    yield sample("prefill, 200 tokens, scales beside the keys", 200, beside=True, skip=(3, 199))
    yield sample("prefill, 70 tokens, not quantized", 70, fp8=False, skip=(0,), padding=2)
    yield sample("padded rows, scales apart", 20, padding=4, block_size=16)
    yield sample("two groups, the last one short", 5, 160, beside=True, block_size=4, serving=False)
    yield sample("dimension 24, not quantized", 5, 24, fp8=False, block_size=3, serving=False)
    yield sample("empty batch", 0, beside=True, serving=False)


class _Lists(_Paged):
    """Source of inputs of ``index_topk``."""

    def sample(
        self,
        label: str,
        requests: Sequence[tuple[int, int]],
        topk: int,
        shape: tuple[int, int] = (8, 32),
        *,
        fp8: bool = False,
        block_size: int = 16,
        padding: int | None = None,
        spare: int = 0,
        hostile: bool = False,
        serving: bool = True,
    ) -> Sample:
        """Make a sample: ``requests`` are (new tokens, all tokens), ``shape`` is (heads, dim); see ``mla_decode``."""
        heads, dim = shape
        rows, lengths = [new for new, _ in requests], [length for _, length in requests]
        table, free = self.table(lengths, block_size, spare, hostile)
        hidden, groups = HIDDEN_BLOCKS if hostile else 0, -(-dim // GROUP)
        tokens = sum(rows) + (padding or 0)
        query = self.integers(tokens, heads, dim, largest=LARGEST_ROUNDED if fp8 else LARGEST_INTEGER)
        # Eighths, more of them positive, as in trained models.
        weights = torch.randint(-4, 9, (tokens, heads), generator=self.generator).to(self.device).float() / 8
        cache = self.integers(free + hidden, block_size, dim)
        cache = cache.to(FP8) if fp8 else cache
        powers = torch.randint(-2, 2, (free + hidden, block_size, groups), generator=self.generator)
        scales = torch.exp2(powers.float()).to(self.device) if fp8 else None
        if hostile:
            unused = ~used_slots(table, lengths, free + hidden, block_size)
            self.spoil(cache, unused)
            cache = cache[:free]
            if scales is not None:
                self.spoil(scales, unused)
                scales = scales[:free]
        args = (
            query,
            weights,
            cache,
            table.to(self.device),
            starts(rows).to(self.device),
            torch.tensor(lengths, dtype=torch.int32).to(self.device),
            max(rows, default=0) + (spare and 3),
            max(lengths, default=0) + spare * block_size,
            topk,
            None if padding is None else torch.full((tokens, topk), 7, dtype=torch.int32, device=self.device),
            *(() if scales is None else (scales,)),
        )
        return Sample(label, args, serving)


MIXED = ((1, 300), (1, 40), (5, 130), (33, 33), (1, 1))
"""New tokens and all tokens of requests."""


def list_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``index_topk``."""
    sample = _Lists(dtype, device, generator).sample
    published = [(1, 2100), (1, 90)]
    yield sample("DeepSeek-V3.2, decode, 2,100 tokens", published, 2048, DEEPSEEK_V3_2, fp8=True, block_size=64)
    yield sample("GLM-5, second chunk of a prompt", [(17, 400)], 256, GLM_5, fp8=True, block_size=64)
    yield sample("GLM-5, keys as they are", [(1, 300), (5, 130), (0, 9), (7, 7)], 64, GLM_5, block_size=64, padding=2)
    yield sample("mixed batch, top 64", MIXED, 64, padding=3)
    yield sample("mixed batch, top 64, fp8", MIXED, 64, fp8=True)
    yield sample("3 tokens a request", [(3, 40), (3, 3), (3, 130)], 16, fp8=True)
    yield sample("as many tokens as are taken, and one more", [(2, 33), (1, 32), (1, 31)], 32, serving=False)
    yield sample("one best token, odd sizes", [(4, 21), (1, 9)], 1, (3, 24), block_size=1, serving=False)
    yield sample("requests without new tokens", [(0, 5), (2, 19), (0, 0)], 8, serving=False)
    yield sample("empty batch", [], 8, serving=False)


def list_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``index_topk``: long contexts, many requests, too large maxima, unused memory that spoils results."""
    sample = _Lists(dtype, device, generator).sample
    yield sample("9,000 tokens, top 512", [(1, 9000), (2, 4100)], 512, (4, 32), serving=False)
    yield sample("300 requests", [(1, 40)] * 300, 16, (2, 16), serving=False)
    yield sample("maxima larger than needed", MIXED, 64, spare=40, serving=False)
    yield sample("NaN in unused slots", MIXED, 64, hostile=True, serving=False)
    yield sample("NaN in unused slots, fp8", MIXED, 64, hostile=True, fp8=True, spare=3, serving=False)


class _Attends(_Paged):
    """Source of inputs of ``mla_sparse``."""

    def sample(
        self,
        label: str,
        requests: Sequence[tuple[int, int]],
        topk: int,
        heads: int,
        rank: int,
        rope: int,
        *,
        block_size: int = 16,
        padding: int | None = None,
        row_stride: int | None = None,
        scale: float | None = None,
        parted: bool = False,
        hostile: bool = False,
        nothing: Sequence[int] = (),
        serving: bool = True,
    ) -> Sample:
        """Make a sample: queries list at most ``topk`` tokens in any order; those in ``nothing`` list none."""
        rows, lengths = [new for new, _ in requests], [length for _, length in requests]
        table, free = self.table(lengths, block_size, 0, hostile)
        hidden = HIDDEN_BLOCKS if hostile else 0
        tokens = sum(rows) + (padding or 0)
        positions, used = torch.full((tokens, topk), -1), torch.zeros(free + hidden, block_size, dtype=torch.bool)
        request = [number for number, new in enumerate(rows) for _ in range(new)]
        for row, number in enumerate(request):
            seen = lengths[number] - sum(rows[: number + 1]) + row + 1
            count = 0 if row in nothing else min(topk, seen)
            listed = torch.randperm(seen, generator=self.generator)[:count]
            positions[row, :count] = listed
            used[table[number, listed // block_size].long(), listed % block_size] = True
        query = self.normal(tokens, heads, rank if parted else rank + rope)
        query_rope = self.normal(tokens, heads, 2 * rope)[..., rope:] if parted else None
        cache = self.normal(free + hidden, block_size, row_stride or rank + rope)
        cache = (cache if scale is None else (cache.float() / scale).to(FP8))[..., : rank + rope]
        if hostile:
            self.spoil(cache, ~used)
            cache = cache[:free]
        args = (
            query,
            cache,
            positions.int().to(self.device),
            table.to(self.device),
            starts(rows).to(self.device),
            max(rows, default=0),
            (rank // 4 + rope) ** -0.5,
            rank,
            None if padding is None else self.normal(tokens, heads, rank),
            *((scale, query_rope) if parted else () if scale is None else (scale,)),
        )
        return Sample(label, args, serving)


def attention_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``mla_sparse``."""
    sample = _Attends(dtype, device, generator).sample
    yield sample("decode, 16 heads, 2,048 of 2,100", [(1, 2100), (1, 700)], 2048, 16, 512, 64, block_size=64)
    yield sample("decode, 128 heads", [(1, 300), (1, 40)], 256, 128, 512, 64, block_size=64, parted=True)
    yield sample("mixed batch, padded", [(1, 300), (5, 130), (7, 7)], 64, 16, 512, 64, padding=3)
    yield sample("query in two parts, fp8 cache", [(1, 300), (3, 130)], 64, 16, 512, 64, parted=True, scale=SCALE)
    yield sample("fp8 cache", [(2, 90)], 32, 4, 64, 16, scale=SCALE, serving=False)
    yield sample("rank 24, rotary part 8, odd heads", [(1, 9), (2, 5)], 4, 3, 24, 8, serving=False)
    yield sample("cache row stride larger than the row", [(1, 40)], 20, 4, 64, 16, row_stride=96, serving=False)
    yield sample("no rotary part", [(1, 18)], 17, 4, 64, 0, serving=False)
    yield sample("rows that list nothing", [(4, 20)], 16, 4, 64, 16, nothing=(1, 3), serving=False)
    yield sample("requests without new tokens", [(0, 5), (2, 19), (0, 0)], 8, 4, 64, 16, serving=False)
    yield sample("empty batch", [], 8, 4, 64, 16, serving=False)


def attention_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``mla_sparse``: long lists, many requests, unlisted memory that would spoil a result."""
    sample = _Attends(dtype, device, generator).sample
    yield sample("4,100 listed", [(1, 5000), (1, 4100)], 4100, 4, 128, 32, serving=False)
    yield sample("300 requests", [(1, 30)] * 300, 8, 2, 32, 16, serving=False)
    yield sample("NaN in slots that are not listed", [(1, 300), (5, 130)], 64, 8, 512, 64, hostile=True, serving=False)
