"""Attention over a paged cache; a query's result depends neither on the batch nor on how a prompt is split.

All products have the same shape: :data:`QUERIES` queries of one request times :data:`KEYS` keys, starting at a multiple
of :data:`KEYS`, with padding for missing queries and keys. The softmax proceeds tile by tile as in flash attention
(Dao, arXiv 2307.08691), so tiles that a query does not see leave its sums unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fl_dispatch.ops.attention import read

from .invariant import INNER

QUERIES = 8
KEYS = 128
LOWEST = -1e30
"""Initial maximum of the scores: finite, to avoid NaN for a query that has not seen a key yet."""


class Rules(NamedTuple):
    """Options of a call for the mask and for the scores."""

    scale: float
    causal: bool
    window: int | None
    softcap: float
    slopes: Tensor | None
    sinks: Tensor | None


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    out: Tensor | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: float | None = None,
    value_scale: float | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.attention.paged_attention`."""
    if out is None:
        out = query.new_zeros((*query.shape[:2], value_cache.shape[-1]))
    wide = torch.promote_types(query.dtype, torch.float32)
    by_head = (1, key_cache.shape[2], 1, -1)
    slopes, sink = (None if each is None else each.to(wide).view(by_head) for each in (alibi_slopes, sinks))
    rules = Rules(scale, causal, sliding_window, softcap, slopes, sink)
    numbers: list[int] = torch.cat((query_start_loc, seq_lens)).tolist()
    starts, lengths = numbers[: len(query_start_loc)], numbers[len(query_start_loc) :]
    for request, length in enumerate(lengths):
        begin, end = starts[request], starts[request + 1]
        position = length - (end - begin)  # of the first query
        # Blocks before the window may already be freed, so nothing before the first visible key is read.
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        table = block_table[request]
        keys = _tiles(key_cache, table, first, length, key_scale, query.dtype)
        values = _tiles(value_cache, table, first, length, value_scale, query.dtype)
        for row in range(begin, end, QUERIES):
            rows = slice(row, min(row + QUERIES, end))
            attended = _attend(query[rows], keys, values, position + row - begin, length, rules)
            out[rows] = attended[..., : out.shape[2]].to(out.dtype)
    return out


def _tiles(cache: Tensor, table: Tensor, first: int, length: int, scale: float | None, dtype: torch.dtype) -> Tensor:
    """Return a request's keys or values from ``first`` on, ``[tiles, kv_heads, KEYS, dim]``, padded with zeros."""
    block_size, heads, dim = cache.shape[1:]
    page = first // block_size
    stored = cache[table[page : -(-length // block_size)]].flatten(0, 1)
    visible = read(stored[first - page * block_size : length - page * block_size], scale, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    tiles = cache.new_zeros(-(-length // KEYS) * KEYS, heads, dim + -dim % INNER, dtype=wide)
    tiles[first:length, :, :dim] = visible
    return tiles.view(-1, KEYS, heads, tiles.shape[2]).transpose(1, 2).contiguous()


def _attend(query: Tensor, keys: Tensor, values: Tensor, position: int, length: int, rules: Rules) -> Tensor:
    """Attention of up to ``QUERIES`` queries, the first at ``position``, ``[queries, heads, dim]``."""
    (count, heads, dim), kv_heads = query.shape, keys.shape[1]
    group, last = heads // kv_heads, position + count - 1
    shape = (QUERIES, kv_heads, group)
    rows = keys.new_zeros(*shape, keys.shape[3])
    rows[:count, ..., :dim] = query.view(count, kv_heads, group, dim)
    q = rows.transpose(0, 1).reshape(kv_heads, QUERIES * group, -1)
    highest, total = keys.new_full(shape, LOWEST), keys.new_zeros(shape)
    if rules.sinks is not None:
        highest, total = rules.sinks[:, :, 0].expand(shape), total + 1.0
    summed = keys.new_zeros(*shape, values.shape[3])
    rows_of_tile, keys_of_tile = (torch.arange(size, device=keys.device) for size in (QUERIES, KEYS))
    low = 0 if rules.window is None else max(0, position - rules.window + 1)
    high = last + 1 if rules.causal else length if rules.window is None else min(length, last + rules.window)
    for tile in range(low // KEYS, -(-high // KEYS)):
        scores = _by_query(torch.bmm(q, keys[tile].transpose(1, 2)), shape) * rules.scale
        distance = rows_of_tile[:, None] + (position - tile * KEYS) - keys_of_tile
        if rules.softcap > 0:
            scores = rules.softcap * torch.tanh(scores / rules.softcap)
        if rules.slopes is not None:
            scores = scores - rules.slopes.transpose(2, 3) * distance.abs()[:, None, None]
        seen = (keys_of_tile < length - tile * KEYS).expand(QUERIES, KEYS)
        if rules.causal:
            seen = seen & (distance >= 0)
        if rules.window is not None:
            seen = seen & (distance.abs() < rules.window)
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        higher = torch.maximum(highest, scores.amax(-1))
        weights, alpha = torch.exp(scores - higher[..., None]), torch.exp(highest - higher)
        highest, total = higher, total * alpha + weights.sum(-1)
        weighted = torch.bmm(weights.transpose(0, 1).reshape(kv_heads, QUERIES * group, KEYS), values[tile])
        summed = summed * alpha[..., None] + _by_query(weighted, shape)
    return (summed / total[..., None])[:count].flatten(1, 2)


def _by_query(rows: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """``[kv_heads, queries times group, n]`` as ``[queries, kv_heads, group, n]``."""
    queries, kv_heads, group = shape
    return rows.view(kv_heads, queries, group, -1).transpose(0, 1)
