"""References of attention over a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_dispatch.devices import device_of
from fl_dispatch.ops.quantization import FP8, LARGEST

from .quantization import quantize

SCORES_AT_ONCE = 1 << 25
"""Queries are taken in parts, so that about this many scores exist at a time."""


def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float | None = None,
    value_scale: float | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """See :data:`fl_dispatch.ops.attention.kv_cache_write`."""
    tokens = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[tokens]
    block_size = key_cache.shape[1]
    block, offset = slots // block_size, slots % block_size
    for new, cache, scale, scales in (
        (key, key_cache, key_scale, key_scales),
        (value, value_cache, value_scale, value_scales),
    ):
        if scales is None:
            cache[block, offset] = _stored(new[tokens], scale).to(cache.dtype)
        else:
            cache[block, offset], units = quantize(new[tokens], "int8")
            scales[block, offset] = units.squeeze(-1).to(scales.dtype)


def _stored(new: Tensor, scale: float | None) -> Tensor:
    """New keys or values as a cache with this scale has them."""
    if scale is None:
        return new
    largest = LARGEST["float8_e4m3fn"]
    return (new.to(torch.promote_types(new.dtype, torch.float32)) / scale).clamp(-largest, largest).to(FP8)


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
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.attention.paged_attention`. Waits for the device once, to read the lengths."""
    if out is None:
        out = query.new_zeros((*query.shape[:2], value_cache.shape[-1]))
    block_size = key_cache.shape[1]
    plain = not causal and sliding_window is None and softcap == 0 and alibi_slopes is None and sinks is None
    fused = plain and not device_of(query.device.type).accelerator and key_cache.shape[-1] == value_cache.shape[-1]
    numbers: list[int] = torch.cat((query_start_loc, seq_lens)).tolist()
    starts, lengths = numbers[: len(query_start_loc)], numbers[len(query_start_loc) :]
    for request, length in enumerate(lengths):
        begin, end = starts[request], starts[request + 1]
        position = length - (end - begin)  # of the first query
        # Blocks that the window has left may be gone, so nothing before the first visible key is read.
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        page = first // block_size
        blocks = block_table[request, page : -(-length // block_size)]
        seen = slice(first - page * block_size, length - page * block_size)
        key_unit = key_scale if key_scales is None else _slots(key_scales, blocks, seen)[..., None]
        value_unit = value_scale if value_scales is None else _slots(value_scales, blocks, seen)[..., None]
        keys = read(_slots(key_cache, blocks, seen), key_unit, query.dtype)
        values = read(_slots(value_cache, blocks, seen), value_unit, query.dtype)
        if fused:
            out[begin:end] = _fused(query[begin:end], keys, values, scale)
            continue
        step = max(1, SCORES_AT_ONCE // max(1, query.shape[1] * len(keys)))
        for row in range(begin, end, step):
            rows = slice(row, min(row + step, end))
            distance = _distance(rows, position - begin - first, keys)
            out[rows] = _attend(
                query[rows], keys, values, distance, scale, causal, sliding_window, softcap, alibi_slopes, sinks
            )
    return out


def _slots(cache: Tensor, blocks: Tensor, seen: slice) -> Tensor:
    """Some of the slots of these blocks, one after the other."""
    return cache[blocks].flatten(0, 1)[seen]


def read(stored: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """Keys or values of a cache with this scale, or with these, for queries of a dtype."""
    return stored if scale is None else stored.to(torch.promote_types(dtype, torch.float32)) * scale


def _fused(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of queries that see every key, by PyTorch's own function, which keeps no scores on a CPU."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (each.to(wide).transpose(0, 1)[None] for each in (query, keys, values))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=len(q[0]) != len(k[0]))
    return attended[0].transpose(0, 1).to(query.dtype)


def _distance(rows: slice, shift: int, keys: Tensor) -> Tensor:
    """How far each key lies before each query, ``[queries, keys]``."""
    queries = torch.arange(rows.start + shift, rows.stop + shift, device=keys.device)
    return queries[:, None] - torch.arange(len(keys), device=keys.device)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    distance: Tensor,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of some queries over the keys of their request, ``[queries, heads, value_dim]``."""
    wide = torch.promote_types(query.dtype, torch.float32)
    kv_heads = keys.shape[1]
    grouped = query.to(wide).reshape(len(query), kv_heads, -1, query.shape[-1])
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys.to(wide)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(wide).view(kv_heads, -1, 1, 1) * distance.abs()
    if causal:
        scores = scores.masked_fill(distance < 0, float("-inf"))
    if sliding_window is not None:
        scores = scores.masked_fill(distance.abs() >= sliding_window, float("-inf"))
    if sinks is not None:
        extra = sinks.to(wide).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, extra), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hgqk,khd->qhgd", weights, values.to(wide)).flatten(1, 2).to(query.dtype)
