"""Inputs of latent attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..declaration import Sample
from ..quantization import FP8
from .paged import DECODE, HIDDEN_BLOCKS, used_slots
from .source import Source, starts

SCALE = 0.03
"""Scale of an fp8 cache, with which its largest number is about 13."""


class Paged(Source):
    """Source of paged caches: blocks of requests in random order. Hosts point unused entries of a table to block 0."""

    def table(self, lengths: Sequence[int], block_size: int, spare: int, hostile: bool) -> tuple[Tensor, int]:
        """Return a table of blocks on the CPU, and the number of blocks; ``hostile`` unused entries point outside."""
        blocks = [-(-length // block_size) for length in lengths]
        pages: list[int] = (1 + self.order(sum(blocks))).tolist()
        free = 1 + sum(blocks)
        table = torch.full((len(lengths), max(blocks, default=0) + 1 + spare), free if hostile else 0).int()
        for row, count in zip(table, blocks, strict=True):
            row[:count] = torch.tensor([pages.pop() for _ in range(count)], dtype=torch.int32)
        return table, free

    def spoil(self, cache: Tensor, unused: Tensor) -> None:
        """Fill slots with NaN."""
        cache.index_put_(unused.to(self.device).nonzero(as_tuple=True), cache.new_tensor(math.nan))


class _Decodes(Paged):
    """Source of inputs of ``mla_decode``."""

    def sample(
        self,
        label: str,
        requests: Sequence[tuple[int, int]],
        heads: int,
        rank: int,
        rope: int,
        *,
        block_size: int = 16,
        padding: int | None = None,
        causal: bool = True,
        row_stride: int | None = None,
        scale: float | None = None,
        parted: bool = False,
        spare: int = 0,
        hostile: bool = False,
        serving: bool = True,
    ) -> Sample:
        """Make a sample: ``requests`` are (new tokens, all tokens), and ``padding`` adds rows to a given ``out``.

        With ``scale`` the cache is in fp8. ``parted`` passes the rotary part as hosts do: it follows a part of the
        query that is not absorbed. ``paged_attention`` explains ``spare`` and ``hostile``.
        """
        rows, lengths = [new for new, _ in requests], [length for _, length in requests]
        table, free = self.table(lengths, block_size, spare, hostile)
        hidden = HIDDEN_BLOCKS if hostile else 0
        tokens = sum(rows) + (padding or 0)
        query = self.normal(tokens, heads, rank if parted else rank + rope)
        query_rope = self.normal(tokens, heads, 2 * rope)[..., rope:] if parted else None
        cache = self.normal(free + hidden, block_size, row_stride or rank + rope)
        cache = (cache if scale is None else (cache.float() / scale).to(FP8))[..., : rank + rope]
        if hostile:
            self.spoil(cache, ~used_slots(table, lengths, free + hidden, block_size))
            cache = cache[:free]
        args = (
            query,
            cache,
            table.to(self.device),
            starts(rows).to(self.device),
            torch.tensor(lengths, dtype=torch.int32).to(self.device),
            max(rows, default=0) + (spare and 3),
            max(lengths, default=0) + spare * block_size,
            (rank // 4 + rope) ** -0.5,
            rank,
            None if padding is None else self.normal(tokens, heads, rank),
            causal,
            *((scale, query_rope) if parted else () if scale is None else (scale,)),
        )
        return Sample(label, args, serving)


def decode_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``mla_decode``."""
    sample = _Decodes(dtype, device, generator).sample
    decode = list(DECODE)
    yield sample("decode, 8 requests, 16 heads", decode, 16, 512, 64)
    yield sample("decode, 4 requests, 128 heads", decode[2:6], 128, 512, 64, block_size=64)
    yield sample("speculative decode, 3 tokens a request", [(3, 40), (3, 3), (3, 130)], 16, 512, 64)
    yield sample("decode with out, padded batch", [*decode[:4], (0, 0)], 8, 512, 64, padding=3)
    yield sample("mixed lengths, block size 1", [(1, 30), (5, 21), (17, 17)], 4, 256, 64, block_size=1)
    yield sample("query in two parts, 16 heads", decode, 16, 512, 64, parted=True)
    yield sample("query in two parts, 128 heads, fp8 cache", decode[2:6], 128, 512, 64, block_size=64, scale=SCALE,
                 parted=True)  # fmt: skip
    yield sample("fp8 cache, decode, 16 heads", decode, 16, 512, 64, scale=SCALE)
    yield sample("fp8 cache, 128 heads", decode[2:6], 128, 512, 64, block_size=64, padding=0, scale=SCALE)
    yield sample("fp8 cache, 3 tokens a request", [(3, 40), (3, 3), (3, 130)], 4, 64, 16, scale=SCALE, serving=False)
    yield sample("fp8 cache, row stride, not causal", [(4, 20), (4, 7)], 3, 24, 8, causal=False, row_stride=48,
                 scale=2.0, serving=False)  # fmt: skip
    yield sample("not causal", [(4, 20), (4, 7)], 4, 64, 32, causal=False, serving=False)
    yield sample("rank 24, rotary part 8, odd heads", [(1, 9), (2, 5)], 3, 24, 8, serving=False)
    yield sample("cache row stride larger than the row", [(1, 40)], 4, 64, 16, row_stride=96, serving=False)
    yield sample("query in two parts, rank 24, odd heads", [(1, 9), (2, 5)], 3, 24, 8, parted=True, serving=False)
    yield sample("no rotary part", [(1, 18)], 4, 64, 0, serving=False)
    yield sample("one token", [(1, 1)], 2, 64, 16, serving=False)
    yield sample("empty batch", [], 4, 64, 16, serving=False)


def decode_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``mla_decode``: long contexts, too large maxima, unused memory that would spoil a result."""
    sample = _Decodes(dtype, device, generator).sample
    yield sample("1,025 to 4,100 keys", [(1, 1025), (1, 2049), (1, 4100)], 4, 128, 32, serving=False)
    yield sample("520 requests", [(1, 3)] * 520, 2, 32, 16, serving=False)
    yield sample("maxima larger than needed", DECODE[:6], 4, 64, 32, spare=70, serving=False)
    yield sample("NaN in unused slots", DECODE, 8, 512, 64, hostile=True, serving=False)
    yield sample("fp8 cache, 4,100 keys, NaN in unused slots", [(1, 4100), (3, 9)], 4, 128, 32, hostile=True,
                 scale=SCALE, serving=False)  # fmt: skip
    speculative = [(3, 40), (3, 3), (3, 130)]
    yield sample(
        "NaN in unused slots, 3 tokens a request", speculative, 4, 128, 32, hostile=True, spare=4, serving=False
    )


class _Prefills(Source):
    """Source of inputs of ``mla_prefill``."""

    def sample(
        self,
        label: str,
        requests: Sequence[tuple[int, int]],
        heads: int,
        head_dim: int,
        value_dim: int,
        *,
        padding: int | None = None,
        causal: bool = True,
        spare: int = 0,
        serving: bool = True,
    ) -> Sample:
        """Make a sample: ``requests`` are (queries, keys), and ``padding`` adds rows to a given ``out``.

        The maxima are larger than needed by ``spare``.
        """
        rows, lengths = [queries for queries, _ in requests], [keys for _, keys in requests]
        tokens = sum(rows) + (padding or 0)
        # As in hosts, values are a view of the projection that also holds most of the keys.
        projection = self.normal(sum(lengths), heads, head_dim + value_dim)
        key, value = torch.tensor_split(projection, (head_dim,), dim=-1)
        args = (
            self.normal(tokens, heads, head_dim),
            key.contiguous(),
            value,
            starts(rows).to(self.device),
            starts(lengths).to(self.device),
            max(rows, default=0) + spare,
            max(lengths, default=0) + spare,
            head_dim**-0.5,
            None if padding is None else self.normal(tokens, heads, value_dim),
            causal,
        )
        return Sample(label, args, serving)


def prefill_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``mla_prefill``."""
    sample = _Prefills(dtype, device, generator).sample
    yield sample("prefill, 2 requests, new tokens", [(64, 64), (21, 21)], 16, 192, 128)
    yield sample("context chunk", [(17, 96), (7, 64)], 16, 192, 128, causal=False)
    yield sample("context chunk, some requests without", [(9, 20), (5, 0), (3, 17)], 8, 192, 128, causal=False)
    yield sample("with out, padded batch", [(17, 17), (5, 5)], 8, 192, 128, padding=3)
    yield sample("more keys than queries, causal", [(5, 30), (16, 33)], 8, 192, 128)
    yield sample("more queries than keys, causal", [(12, 5)], 2, 48, 32, serving=False)
    yield sample("head size 40, value 24, odd heads", [(6, 6)], 3, 40, 24, serving=False)
    yield sample("one token", [(1, 1)], 2, 64, 64, serving=False)
    yield sample("empty batch", [], 4, 64, 32, serving=False)


def prefill_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``mla_prefill``: long contexts, and maxima that are larger than needed."""
    sample = _Prefills(dtype, device, generator).sample
    yield sample("1,100 tokens", [(1100, 1100)], 2, 48, 32, serving=False)
    yield sample("chunk of 4,100 keys", [(5, 4100), (3, 1025)], 2, 48, 32, causal=False, serving=False)
    yield sample("maxima larger than needed", [(5, 30), (16, 33)], 4, 48, 32, spare=200, serving=False)
