"""Attention over a paged key-value cache, and the choice of a host's attention class."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .declaration import (
    SEVERAL_ROUNDINGS,
    STANDARD_TOLERANCE,
    Access,
    Mode,
    SmallState,
    Tolerance,
    Work,
    Write,
    nothing,
    operator,
    queries_workload,
    slots_workload,
)
from .inputs import paged, shapes
from .quantization import FP8, LARGEST, quantize

MODES = frozenset({Mode.OPAQUE, Mode.EAGER})
STATE = Write(Access.STATE)
SCALES = ("key_scale", "value_scale")
"""Parameters that a call passes with an fp8 cache."""
TOKEN_SCALES = ("key_scales", "value_scales")
"""Parameters that a call passes with an int8 cache."""
# The result is a mean of values, so it shrinks with the number of keys. The standard absolute error of the half types
# would accept anything for a long sequence, while rounding the weights to the half type costs at most half a unit of
# the mean magnitude. In float32 an error of a score is a relative error of its weight, and the weighted values cancel.
TOLERANCES = MappingProxyType(
    {
        **STANDARD_TOLERANCE,
        torch.float32: Tolerance(2e-5, 1e-5),
        torch.float16: Tolerance(2e-3, 5e-4),
        torch.bfloat16: Tolerance(1.6e-2, 4e-3),
    }
)


def _write_work(key: Tensor, value: Tensor, key_cache: Tensor, slot_mapping: Tensor) -> Work:
    slots = slot_mapping.shape[0]
    rows, dims = slots * key.shape[1], key.shape[2] + value.shape[2]
    read = rows * dims * key.element_size() + slots * slot_mapping.element_size()
    return Work(read + rows * (dims * key_cache.element_size() + _scale_bytes(key_cache)), 0)


def _scale_bytes(key_cache: Tensor) -> int:
    """Return the bytes of the scales of one token's key and value in one head."""
    return 2 * torch.float32.itemsize if key_cache.dtype is torch.int8 else 0


def small_caches(
    key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, **token_scales: Tensor | None
) -> dict[str, Any]:
    """Return caches with one slot per token, slots in their order, and the scales of such caches, by parameter."""
    tokens, block_size = slot_mapping.shape[0], key_cache.shape[1]
    blocks = -(-tokens // block_size)
    caches = {"key_cache": key_cache, "value_cache": value_cache, **token_scales}
    small = {
        name: cache if cache is None else cache.new_empty(blocks, *cache.shape[1:]) for name, cache in caches.items()
    }
    slots = torch.arange(tokens, device=slot_mapping.device, dtype=slot_mapping.dtype)
    return {**small, "slot_mapping": torch.where(slot_mapping < 0, slot_mapping, slots)}


def _in_small_caches(
    key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
) -> dict[str, Any]:
    return small_caches(key_cache, value_cache, slot_mapping, key_scales=key_scales, value_scales=value_scales)


def written_slots(
    key: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return keys and values in the addressed slots, ``[tokens, kv_heads, dim]``, dtype of ``key``; zeros if skipped.

    Scales of an int8 cache follow, ``[tokens, kv_heads, 1]``.
    """
    slots, block_size = slot_mapping.clamp(min=0), key_cache.shape[1]
    skipped = (slot_mapping < 0)[:, None, None]
    scales = (scale[..., None] for scale in (key_scales, value_scales) if scale is not None)
    found = (cache[slots // block_size, slots % block_size].to(key.dtype) for cache in (key_cache, value_cache))
    units = (scale[slots // block_size, slots % block_size] for scale in scales)
    return tuple(one.masked_fill(skipped, 0) for one in (*found, *units))


SCORES_AT_ONCE = 1 << 25
"""Scores that exist at a time, approximately; queries are split accordingly."""


@operator(
    hints=("may_skip",),
    later=(*SCALES, *TOKEN_SCALES),
    writes=dict.fromkeys(("key_cache", "value_cache", *TOKEN_SCALES), STATE),
    small_state=SmallState(_in_small_caches, written_slots),
    modes=MODES,
    fake=nothing,
    samples=paged.write_samples,
    probes=paged.write_probes,
    shapes=shapes.cache_writes,
    aliases=("reshape_and_cache", "reshape_and_cache_flash", "store_kv_cache", "set_kv_buffer"),
    workload=slots_workload,
    work=_write_work,
    waits=True,
    batch_invariant=True,
)
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
    may_skip: bool | None = None,
) -> None:
    """Store keys and values of new tokens in a paged cache.

    Token ``t`` goes to block ``slot_mapping[t] // block_size`` at offset ``slot_mapping[t] % block_size``; a negative
    slot is skipped. Non-negative slots are distinct.

    A float8_e4m3fn cache gets the numbers nearest to ``key / key_scale`` and ``value / value_scale``, ties to even,
    clamped to 448. An int8 cache gets each head's key and value as quantized by
    :data:`~fl_dispatch.ops.quantization.quantize`, with their scales.

    Args:
        key: ``[tokens, kv_heads, head_dim]``, floating point, any strides. Rows beyond ``slot_mapping`` are padding.
        value: ``[tokens, kv_heads, value_dim]``, dtype of ``key``, any strides.
        key_cache: ``[blocks, block_size, kv_heads, head_dim]``, a view in any strides. The addressed slots are
            overwritten.
        value_cache: ``[blocks, block_size, kv_heads, value_dim]``, a view in any strides. The addressed slots are
            overwritten.
        slot_mapping: ``[at most tokens]``, int64.
        key_scale, value_scale: scales of float8_e4m3fn caches; ``None`` for other dtypes.
        key_scales, value_scales: ``[blocks, block_size, kv_heads]``, float32, views in any strides: scales of int8
            caches; ``None`` for other dtypes. The addressed slots are overwritten.
        may_skip: hint: ``False`` if the caller knows that no slot is negative.
    """
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
            cache[block, offset], units = quantize.reference(new[tokens], "int8")
            scales[block, offset] = units.squeeze(-1).to(scales.dtype)


def _stored(new: Tensor, scale: float | None) -> Tensor:
    """Return new keys or values as a cache with this scale stores them."""
    if scale is None:
        return new
    largest = LARGEST["float8_e4m3fn"]
    return (new.to(torch.promote_types(new.dtype, torch.float32)) / scale).clamp(-largest, largest).to(FP8)


def _fake(query: Tensor, value_cache: Tensor, out: Tensor | None) -> Tensor:
    return query.new_empty((*query.shape[:2], value_cache.shape[-1])) if out is None else out


def _work(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal: bool,
    sliding_window: int | None,
) -> Work:
    pairs = keys = 0
    starts: list[int] = query_start_loc.tolist()
    lengths: list[int] = seq_lens.tolist()
    for begin, end, length in zip(starts, starts[1:], lengths, strict=False):
        if begin == end:
            continue
        window = length if sliding_window is None else sliding_window
        first = length - (end - begin)
        keys += length - max(0, first - window + 1)
        for position in range(first, length):
            last = position + 1 if causal else min(length, position + window)
            pairs += last - max(0, position - window + 1)
    heads, dims = query.shape[1], key_cache.shape[-1] + value_cache.shape[-1]
    queries = starts[-1] * heads * dims * query.element_size()
    stored = dims * key_cache.element_size() + _scale_bytes(key_cache)
    return Work(queries + keys * key_cache.shape[2] * stored, 2 * pairs * heads * dims)


@operator(
    hints=("query_start_loc_host", "seq_lens_host"),
    later=(*SCALES, *TOKEN_SCALES),
    writes={"out": Write(Access.OUTPUT)},
    modes=MODES,
    fake=_fake,
    samples=paged.attention_samples,
    probes=paged.attention_probes,
    shapes=shapes.attention,
    aliases=("attention", "flash_attention", "flash_attn_varlen_func", "unified_attention"),
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=queries_workload,
    phases=True,
    work=_work,
    waits=True,
)
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
    query_start_loc_host: Sequence[int] | None = None,
    seq_lens_host: Sequence[int] | None = None,
) -> Tensor:
    """Attention of new tokens over a paged cache, prefill and decode mixed (Kwon et al., arXiv 2309.06180).

    Query ``i`` of a request stands at ``p = seq_len - query_len + i``, and the cache already holds the new tokens. The
    score of the key at ``j`` is ``s = scale * (q . k)``, then ``softcap * tanh(s / softcap)``, then minus ``slope * |p
    - j|`` (Press et al., arXiv 2108.12409). Head ``h`` reads key-value head ``h // (heads / kv_heads)``.

    Args:
        query: ``[tokens, heads, head_dim]``, floating point.
        key_cache: ``[blocks, block_size, kv_heads, head_dim]``, a view in any strides.
        value_cache: ``[blocks, block_size, kv_heads, value_dim]``, a view in any strides. Slots without a token of a
            request may hold anything, NaN included.
        block_table: ``[requests, max_blocks]``, int32: the blocks of a request in order. Entries that no visible key
            needs may hold anything.
        query_start_loc: ``[requests + 1]``, int32: first row of each request in ``query``, and the end of the last one.
        seq_lens: ``[requests]``, int32: number of keys of each request, including the new tokens.
        max_query_len: largest number of new tokens of a request, or more.
        max_seq_len: largest of ``seq_lens``, or more.
        scale: factor of the scores.
        out: ``[tokens, heads, value_dim]``, or ``None`` for a new tensor. Overwritten, except rows that no request
            covers.
        causal: whether a query sees no key after its own position.
        sliding_window: number of keys that a query sees, including its own position; ``None`` for all. Without
            ``causal`` it sees the same number on the other side.
        softcap: bound of the scores; 0 for none.
        alibi_slopes: ``[heads]``, float32, or ``None``.
        sinks: ``[heads]``, floating point, or ``None``: one more score for each head that takes part in the softmax's
            denominator only (Xiao et al., arXiv 2309.17453).
        key_scale, value_scale: scales of float8_e4m3fn caches: ``k = key_scale * stored`` and ``v = value_scale *
            stored``; ``None`` for other dtypes.
        key_scales, value_scales: ``[blocks, block_size, kv_heads]``, float32, views in any strides: scales of int8
            caches, for each token and head; ``None`` for other dtypes.
        query_start_loc_host: hint: the numbers in ``query_start_loc``, for kernels that take them as integers.
        seq_lens_host: hint: the numbers in ``seq_lens``, for kernels that take them as integers.

    Returns:
        ``[tokens, heads, value_dim]``, dtype of ``query``: ``out`` if given. Rows that no request covers are
        unspecified in a new tensor.
    """
    if out is None:
        out = query.new_zeros((*query.shape[:2], value_cache.shape[-1]))
    block_size = key_cache.shape[1]
    plain = not causal and sliding_window is None and softcap == 0 and alibi_slopes is None and sinks is None
    fused = plain and query.is_cpu and key_cache.shape[-1] == value_cache.shape[-1]
    numbers: list[int] = torch.cat((query_start_loc, seq_lens)).tolist()
    starts, lengths = numbers[: len(query_start_loc)], numbers[len(query_start_loc) :]
    for request, length in enumerate(lengths):
        begin, end = starts[request], starts[request + 1]
        position = length - (end - begin)  # position of the first query
        # Blocks outside the window may be freed, so nothing before the first visible key is read.
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
    """Return a slice of the slots of these blocks, in order."""
    return cache[blocks].flatten(0, 1)[seen]


def read(stored: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return keys or values of a cache in a query's dtype, multiplied by their scale or scales."""
    return stored if scale is None else stored.to(torch.promote_types(dtype, torch.float32)) * scale


def _fused(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend with queries that see every key, by PyTorch's own function, which stores no scores on a CPU."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (each.to(wide).transpose(0, 1)[None] for each in (query, keys, values))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=len(q[0]) != len(k[0]))
    return attended[0].transpose(0, 1).to(query.dtype)


def _distance(rows: slice, shift: int, keys: Tensor) -> Tensor:
    """Return the distance of each key before each query, ``[queries, keys]``."""
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
    """Attend with some queries over the keys of their request, ``[queries, heads, value_dim]``."""
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


@operator(selection=True)
def attention_backend(use_mla: bool = False) -> str:
    """Return the attention class that a host should use.

    Args:
        use_mla: whether the model has multi-head latent attention.

    Returns:
        Its class path, such as ``package.module.ClassName``.
    """
    raise NotImplementedError
