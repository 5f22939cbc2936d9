"""Layouts of attention's tensors, pages of its cache, and the sequences that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import require, require_contiguous


def cumulative(name: str, ends: list[int] | None, total: int | None) -> list[tuple[int, int]]:
    """The ranges that cumulative lengths name."""
    require(ends is not None and len(ends) > 0, f"{name} must be given for layout TND")
    assert ends is not None
    require(all(isinstance(end, int) for end in ends), f"{name} must be integers on the host")
    require(len(ends) <= 4096, f"{name} has {len(ends)} sequences; 4096 are the most")
    starts = [0, *ends[:-1]]
    require(
        all(0 <= a <= b for a, b in zip(starts, ends, strict=True)),
        f"{name} must be cumulative: each at least the one before, none negative",
    )
    if total is not None:
        require(ends[-1] == total, f"{name} ends at {ends[-1]}, and there are {total} tokens")
    return list(zip(starts, ends, strict=True))


LAYOUTS = {
    "BSH": ("BSH", "BSH"),
    "BSND": ("BSND", "BSND"),
    "BNSD": ("BNSD", "BNSD"),
    "BNSD_BSND": ("BNSD", "BSND"),
    "TND": ("TND", "TND"),
    "TND_NTD": ("TND", "NTD"),
    "NTD_TND": ("NTD", "TND"),
}
"""``input_layout`` → layouts of the input and of the output. The outputs NBSD are not emulated."""


def to_sequences(tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """A tensor of one layout as [B, S, N, D], or [T, N, D]."""
    require(tensor.dim() == len(layout), f"layout {layout} has {len(layout)} dimensions, a tensor {tensor.dim()}")
    if layout == "BSH":
        require(tensor.shape[-1] % heads == 0, f"H is {tensor.shape[-1]}, and there are {heads} heads")
        return tensor.unflatten(-1, (heads, -1))
    if layout in ("BNSD", "NTD"):
        tensor = tensor.transpose(-3, -2)
    require(tensor.shape[-2] == heads, f"layout {layout} has {tensor.shape[-2]} heads, and {heads} are named")
    return tensor


def from_sequences(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The opposite of ``to_sequences``."""
    if layout == "BSH":
        return tensor.flatten(-2)
    return tensor.transpose(-3, -2).contiguous() if layout in ("BNSD", "NTD") else tensor


@dataclass(frozen=True)
class Pages:
    """A paged KV cache: [blocks, block_size, KV heads * D], or for some layouts [blocks, KV heads, block_size, D]."""

    table: torch.Tensor
    block_size: int
    kv_heads: int

    def check(self, cache: torch.Tensor, layout: str, queries: int, latent: bool) -> None:
        size = self.block_size
        require(self.table.dtype == torch.int32, f"block_table is {self.table.dtype}, not int32")
        require(self.table.dim() == 2, f"block_table has {self.table.dim()} dimensions, not 2")
        require_contiguous(block_table=self.table)
        if latent or layout in ("TND", "NTD"):
            require(0 < size <= 1024 and size % 16 == 0, f"block_size={size}; a multiple of 16 up to 1024 is wanted")
        elif queries > 1:
            require(128 <= size <= 512 and size % 128 == 0, f"block_size={size}; 128, 256, 384 or 512 are allowed")
        else:
            require(0 < size <= 512 and size % 16 == 0, f"block_size={size}; a multiple of 16 up to 512 is wanted")
        if cache.dim() == 4:
            require(layout in ("BNSD", "TND", "NTD"), f"layout {layout} takes a cache [blocks, block_size, H] only")
            wanted = (cache.shape[0], self.kv_heads, size, cache.shape[3])
            require(
                cache.shape == wanted,
                f"a cache of four dimensions is [blocks, KV heads, block_size, D], here {wanted}, "
                f"not {tuple(cache.shape)}",
            )
        else:
            require(cache.dim() == 3, f"a paged cache has 3 or 4 dimensions, not {cache.dim()}")
            require(cache.shape[1] == size, f"the cache has blocks of {cache.shape[1]}, block_size is {size}")
            require(cache.shape[2] <= 65535, f"KV heads * D is {cache.shape[2]}, above 65535")
            require(cache.shape[2] % self.kv_heads == 0, f"H is {cache.shape[2]}, of {self.kv_heads} KV heads")

    def gather(self, cache: torch.Tensor, sequence: int, length: int) -> torch.Tensor:
        """The first tokens of a sequence, [length, KV heads, D]."""
        count = -(-length // self.block_size)
        require(
            count <= self.table.shape[1],
            f"sequence {sequence} has {length} keys, {count} blocks; block_table has {self.table.shape[1]} columns",
        )
        blocks = self.table[sequence, :count].long()
        require(
            bool(((blocks >= 0) & (blocks < len(cache))).all()),
            f"block_table names block {blocks.tolist()} of {len(cache)} for sequence {sequence}",
        )
        rows = cache[blocks]
        rows = rows.transpose(1, 2).flatten(0, 1) if cache.dim() == 4 else rows.flatten(0, 1)
        return rows.reshape(count * self.block_size, self.kv_heads, -1)[:length]


def sequences(
    q: torch.Tensor,
    caches: list[torch.Tensor],
    layout: str,
    kv_heads: int,
    query_lengths: list[int] | None,
    kv_lengths: list[int] | None,
    pages: Pages | None,
) -> Iterator[tuple[int, Any, int, list[torch.Tensor]]]:
    """For each sequence: its number, where its queries are, how many of them count, and keys, values (and rope)."""
    kv_total = None
    if pages is None:
        caches = [to_sequences(cache, layout, kv_heads) for cache in caches]
        kv_total = caches[0].shape[0]
    if layout in ("TND", "NTD"):
        ranges = cumulative("actual_seq_lengths", query_lengths, len(q))
        kv = [(0, n) for n in kv_lengths or []] if pages else cumulative("actual_seq_lengths_kv", kv_lengths, kv_total)
        require(len(kv) == len(ranges), f"{len(ranges)} sequences of queries, {len(kv)} of keys")
        for number, ((start, end), (first, last)) in enumerate(zip(ranges, kv, strict=True)):
            keys = [pages.gather(c, number, last) if pages else c[first:last] for c in caches]
            yield number, slice(start, end), end - start, keys
        return
    batch, queries = q.shape[:2]
    lengths = _per_batch("actual_seq_lengths", query_lengths if queries > 1 else None, batch, queries)
    most = pages.table.shape[1] * pages.block_size if pages else caches[0].shape[1]
    for number, (length, kv_length) in enumerate(
        zip(lengths, _per_batch("actual_seq_lengths_kv", kv_lengths, batch, most), strict=True)
    ):
        keys = [pages.gather(c, number, kv_length) if pages else c[number, :kv_length] for c in caches]
        yield number, number, length, keys


def _per_batch(name: str, lengths: list[int] | None, batch: int, most: int) -> list[int]:
    if lengths is None:
        return [most] * batch
    require(len(lengths) == 1 or len(lengths) >= batch, f"{name} has {len(lengths)} values for {batch} sequences")
    found = list(lengths) * batch if len(lengths) == 1 else list(lengths)[:batch]
    require(all(0 <= length <= most for length in found), f"{name} {found} exceeds {most}")
    return found
