"""Inputs of the operator that rotates queries and keys and writes keys and values into the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..declaration import Sample
from ..rotary import Rotations
from . import paged


class _Rotated:
    """Source of inputs of the fused operator, made of inputs of its two operators."""

    def __init__(self, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
        self.rotations = Rotations(dtype, device, generator)
        self.writes = paged.Writes(dtype, device, generator)

    def sample(
        self,
        label: str,
        tokens: int,
        heads: tuple[int, int],
        head_dim: int,
        rotary_dim: int | None = None,
        value_dim: int | None = None,
        *,
        interleaved: bool = False,
        index: torch.dtype = torch.int64,
        table: torch.dtype | None = None,
        blocks: int = 24,
        block_size: int = 16,
        layout: str = "head-major",
        skip: Sequence[int] = (),
        padding: int = 0,
        scales: tuple[float, float] | None = None,
        exact: bool = False,
        serving: bool = True,
    ) -> Sample:
        write = self.writes.sample(
            label, tokens, heads[1], head_dim, value_dim, blocks=blocks, block_size=block_size, layout=layout,
            skip=skip, padding=padding, scales=scales, exact=exact,
        )  # fmt: skip
        key, value, *caches, slots = write.args[:5]
        rows = tokens + padding
        # As in hosts, one projection holds query, key and value.
        projection = torch.cat((self.rotations.normal(rows, heads[0] * head_dim), key.flatten(1), value.flatten(1)), -1)
        sizes = [heads[0] * head_dim, heads[1] * head_dim, value[0].numel() if rows else heads[1] * value.shape[2]]
        shapes = ((rows, heads[0], head_dim), key.shape, value.shape)
        parts = [part.view(shape) for part, shape in zip(projection.split_with_sizes(sizes, -1), shapes, strict=True)]
        positions = self.rotations.positions(rows, index)
        if scales is not None:  # keys at angle zero, so that all right implementations quantize them alike
            positions.zero_()
        tables = self.rotations.tables(rotary_dim or head_dim, table)
        args = (*parts, *tables, positions, *caches, slots, interleaved)
        return Sample(label, args if scales is None else (*args, *scales), serving)


def samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``rotary_embedding_kv_cache_write``."""
    sample = _Rotated(dtype, device, generator).sample
    yield sample("decode, 32 tokens", 32, (32, 8), 128)
    yield sample("prefill, 200 tokens", 200, (8, 4), 64)
    yield sample("one token", 1, (32, 8), 128)
    yield sample("half of the head, token-major cache", 16, (8, 2), 80, 32, layout="token-major")
    yield sample("interleaved, padded and skipped tokens", 12, (4, 4), 64, interleaved=True, skip=(0, 7, 11), padding=4)
    yield sample("interleaved, half of the head", 9, (8, 2), 96, 64, interleaved=True)
    yield sample("keys transposed, block size 32", 33, (4, 2), 64, block_size=32, layout="keys transposed")
    yield sample("24 heads of 80 elements, 3 of keys", 9, (24, 3), 80)
    yield sample("fp8 cache, decode", 32, (32, 8), 128, scales=paged.SCALES)
    yield sample("fp8 cache, part of the head", 9, (4, 2), 96, 64, skip=(3,), padding=2, scales=paged.SCALES)
    label = "fp8 cache, nothing to round"
    yield sample(label, 9, (4, 2), 96, 64, skip=(1,), scales=(0.25, 0.5), exact=True, serving=False)
    yield sample("value narrower than key, int32 positions", 9, (4, 2), 96, None, 64, index=torch.int32, serving=False)
    wide = torch.promote_types(dtype, torch.float32)
    yield sample("float32 table", 9, (8, 2), 64, table=wide, serving=False)
    yield sample("rotary dimension 20 of 24, block size 1", 5, (3, 1), 24, 20, block_size=1, serving=False)
    yield sample("only skipped tokens", 2, (2, 1), 64, skip=(0, 1), serving=False)
    yield sample("only padding", 0, (2, 1), 64, padding=3, serving=False)
    yield sample("empty batch", 0, (8, 2), 64, serving=False)


def probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``rotary_embedding_kv_cache_write``: many tokens, many heads."""
    sample = _Rotated(dtype, device, generator).sample
    yield sample("8,200 tokens", 8200, (2, 1), 16, blocks=520, serving=False)
    yield sample("128 heads of queries and keys", 5, (128, 128), 64, serving=False)
