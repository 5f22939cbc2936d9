"""Blocks of all layers as bytes, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 16 << 20
"""Bytes of one message, unless a single block has more."""


class Blocks:
    """A worker's KV cache, block by block.

    The bytes of some blocks are the first layer's, block after block, then the next layer's.

    Args:
        caches: layer → its cache; the first axis has one or more rows for each block. Layers may share one.
        number: number of blocks.
        facts: further values that must be equal on both sides of an exchange.

    Raises:
        ValueError: a layer's blocks do not follow each other on its first axis.
    """

    def __init__(self, caches: Mapping[str, Tensor], number: int, **facts: Any) -> None:
        distinct = {(cache.data_ptr(), cache.shape): (name, cache) for name, cache in sorted(caches.items())}
        for name, cache in distinct.values():
            if cache.shape[0] % number:
                shape = list(cache.shape)
                raise ValueError(
                    f"P2P: the first axis of the KV cache of {name}, {shape}, is no multiple of {number} blocks"
                )
        self._caches = [cache.unflatten(0, (number, -1)) for _, cache in distinct.values()]
        self._sizes = [cache[0].numel() * cache.element_size() for cache in self._caches]
        self.block_bytes = sum(self._sizes)
        self.device = self._caches[0].device
        layers = [(name, list(cache.shape[1:]), str(cache.dtype)) for name, cache in distinct.values()]
        described = json.dumps([layers, sorted(facts.items())])
        self.layout = hashlib.blake2b(described.encode(), digest_size=16).digest()
        """A digest that is equal for blocks of the same form."""

    @property
    def at_once(self) -> int:
        """Return the number of blocks in one message."""
        return max(1, CHUNK // self.block_bytes)

    @property
    def message_bytes(self) -> int:
        """Return the largest number of bytes of one message."""
        return self.at_once * self.block_bytes

    def read(self, ids: Sequence[int], into: Tensor) -> None:
        """Copy blocks into bytes, in main memory or on the device."""
        for cache, bytes_ in self._parts(len(ids), into):
            rows = torch.tensor(ids, device=cache.device)
            bytes_.view(cache.dtype).view(len(ids), *cache.shape[1:]).copy_(cache.index_select(0, rows))

    def write(self, ids: Sequence[int], given: Tensor, skip: int, count: int) -> None:
        """Copy bytes of ``count`` blocks into our blocks, starting at the bytes' block ``skip``."""
        for cache, bytes_ in self._parts(count, given):
            rows = torch.tensor(ids, device=cache.device)
            source = bytes_.view(cache.dtype).view(count, *cache.shape[1:])[skip : skip + len(ids)]
            cache.index_copy_(0, rows, source.to(cache.device))

    def _parts(self, count: int, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = whole[: count * self.block_bytes].split([count * size for size in self._sizes])
        return list(zip(self._caches, parts, strict=True))
