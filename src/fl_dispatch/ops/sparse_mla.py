"""Sparse latent attention: an indexer lists the cached tokens that each query attends to, and attention reads these.

DeepSeek-V3.2 (DeepSeek-AI, arXiv 2512.02556, section 2.1) stores a small index key of each token in addition to its
latent row. A query is scored against the index keys of all tokens up to its own, and its latent attention sees only the
``topk`` best. A query with at most ``topk`` tokens sees all of them, so its attention equals that of :mod:`.mla`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .attention import SCORES_AT_ONCE, TOLERANCES
from .declaration import (
    SEVERAL_ROUNDINGS,
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
from .inputs import shapes, sparse
from .mla import latent_result
from .quantization import EXACT, FP8, LARGEST

MODES = frozenset({Mode.OPAQUE, Mode.EAGER})
STATE = Write(Access.STATE)
INDEX_GROUP = 128
"""Elements of an index key that share a scale."""
LEAST_MAGNITUDE = 1e-4
"""Lower bound of the largest magnitude of a group."""
SAME: Mapping[torch.dtype, Tolerance] = MappingProxyType(dict.fromkeys(EXACT, Tolerance(0.0, 0.0)))
"""Tolerances of positions: samples have exact scores, so equal scores are equal in every implementation."""


def _write_work(key: Tensor, key_cache: Tensor, slot_mapping: Tensor, key_scales: Tensor | None = None) -> Work:
    slots, dim = slot_mapping.shape[0], key.shape[1]
    scales = 0 if key_scales is None else key_scales.shape[-1] * key_scales.element_size()
    stored = dim * (key.element_size() + key_cache.element_size())
    return Work(slots * (stored + scales + slot_mapping.element_size()), 0)


def _small_caches(key_cache: Tensor, slot_mapping: Tensor, key_scales: Tensor | None) -> dict[str, Any]:
    """Return caches with one slot per token, and slots in their order."""
    tokens, block_size = slot_mapping.shape[0], key_cache.shape[1]
    slots = torch.arange(tokens, device=slot_mapping.device, dtype=slot_mapping.dtype)
    small = {
        name: None if cache is None else cache.new_empty(-(-tokens // block_size), *cache.shape[1:])
        for name, cache in (("key_cache", key_cache), ("key_scales", key_scales))
    }
    return {**small, "slot_mapping": torch.where(slot_mapping < 0, slot_mapping, slots)}


def _written(key: Tensor, key_cache: Tensor, slot_mapping: Tensor, key_scales: Tensor | None) -> tuple[Tensor, ...]:
    """Return keys in the addressed slots and their scales; zeros if skipped."""
    slots, block_size, skipped = slot_mapping.clamp(min=0), key_cache.shape[1], (slot_mapping < 0)[:, None]
    keys = key_cache[slots // block_size, slots % block_size].to(key.dtype).masked_fill(skipped, 0)
    if key_scales is None:
        return (keys,)
    return keys, key_scales[slots // block_size, slots % block_size].masked_fill(skipped, 0)


@operator(
    hints=("may_skip",),
    writes={"key_cache": STATE, "key_scales": STATE},
    small_state=SmallState(_small_caches, _written),
    modes=MODES,
    fake=nothing,
    samples=sparse.write_samples,
    aliases=("indexer_k_quant_and_cache",),
    tolerances=EXACT,
    workload=slots_workload,
    work=_write_work,
    waits=True,
)
def index_key_write(
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None = None,
    may_skip: bool | None = None,
) -> None:
    """Store the index keys of new tokens in their paged cache.

    Token ``t`` goes to block ``slot_mapping[t] // block_size`` at offset ``slot_mapping[t] % block_size``; a negative
    slot is skipped. Non-negative slots are distinct.

    A float8_e4m3fn cache gets the numbers nearest to ``key / scale``, ties to even. The scale of 128 elements is their
    largest magnitude, at least 1e-4, divided by 448 and rounded up to a power of two (the format ``ue8m0`` of
    DeepSeek-V3.2).

    Args:
        key: ``[tokens, dim]``, floating point, any strides. Rows beyond ``slot_mapping`` are padding.
        key_cache: ``[blocks, block_size, dim]``, float8_e4m3fn with scales, else floating point, a view in any strides.
            The addressed slots are overwritten.
        slot_mapping: ``[at most tokens]``, int64.
        key_scales: ``[blocks, block_size, dim / 128 rounded up]``, float32, a view in any strides: scales of a
            float8_e4m3fn cache; ``None`` for other dtypes. The addressed slots are overwritten.
        may_skip: hint: ``False`` if the caller knows that no slot is negative.
    """
    tokens = (slot_mapping >= 0).nonzero().squeeze(1)
    slots, block_size = slot_mapping[tokens], key_cache.shape[1]
    block, offset, new = slots // block_size, slots % block_size, key[tokens]
    if key_scales is None:
        key_cache[block, offset] = new.to(key_cache.dtype)
        return
    numbers, scales = _in_fp8(new.to(torch.promote_types(key.dtype, torch.float32)))
    key_cache[block, offset] = numbers.to(key_cache.dtype)
    key_scales[block, offset] = scales.to(key_scales.dtype)


def _in_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in float8_e4m3fn and the scales of their groups, as ``index_key_write`` stores them."""
    largest, dim = LARGEST["float8_e4m3fn"], rows.shape[-1]
    grouped = functional.pad(rows, (0, -dim % INDEX_GROUP)).view(*rows.shape[:-1], -(-dim // INDEX_GROUP), INDEX_GROUP)
    least = grouped.abs().amax(-1).clamp(min=LEAST_MAGNITUDE) / largest
    mantissa, exponent = torch.frexp(least)
    scales = torch.ldexp(torch.ones_like(least), exponent - (mantissa == 0.5).int())
    return (rows / _spread(scales, dim)).clamp(-largest, largest).to(FP8), scales


def _spread(scales: Tensor, dim: int) -> Tensor:
    """Expand scales of groups to one for each element of a row."""
    return scales.repeat_interleave(INDEX_GROUP, -1)[..., :dim]


def _list_fake(query: Tensor, topk: int, out: Tensor | None) -> Tensor:
    return query.new_empty((query.shape[0], topk), dtype=torch.int32) if out is None else out


def _list_work(
    query: Tensor, weights: Tensor, key_cache: Tensor, query_start_loc: Tensor, seq_lens: Tensor, topk: int
) -> Work:
    rows: list[int] = query_start_loc.diff().tolist()
    lengths = [length if new else 0 for new, length in zip(rows, seq_lens.tolist(), strict=True)]
    pairs = sum(length - new + row + 1 for new, length in zip(rows, lengths, strict=True) for row in range(new))
    heads, dim = query.shape[1:]
    stored = dim * key_cache.element_size() + (4 * -(-dim // INDEX_GROUP) if key_cache.dtype is FP8 else 0)
    queries = sum(rows) * (heads * (dim * query.element_size() + weights.element_size()) + 4 * topk)
    return Work(queries + sum(lengths) * stored, 2 * pairs * heads * (dim + 1))


@operator(
    writes={"out": Write(Access.OUTPUT)},
    modes=MODES,
    fake=_list_fake,
    samples=sparse.list_samples,
    probes=sparse.list_probes,
    shapes=shapes.index_topk,
    aliases=("lightning_indexer", "sparse_attn_indexer"),
    tolerances=SAME,
    workload=queries_workload,
    phases=True,
    work=_list_work,
    waits=True,
)
def index_topk(
    query: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    topk: int,
    out: Tensor | None = None,
    key_scales: Tensor | None = None,
) -> Tensor:
    """List the cached tokens that each query attends to: the ``topk`` with the best index scores.

    Query ``i`` of a request stands at ``p = seq_len - query_len + i``, and the cache already holds the new tokens. The
    score of the token at ``j <= p`` is the sum over heads of ``weights * relu(q . k)`` (DeepSeek-AI, arXiv 2512.02556,
    equation 1). If scores are equal, the lower position is taken first.

    For a cache in float8_e4m3fn, ``q`` is the query of a head rounded as ``index_key_write`` rounds keys, as published.

    Args:
        query: ``[tokens, heads, dim]``, floating point.
        weights: ``[tokens, heads]``, float32: weights of the heads, including any constant factor of the scores.
        key_cache: ``[blocks, block_size, dim]``, in float8_e4m3fn with scales, else in the dtype of ``query``, a view
            in any strides. Slots that hold no token of a request may hold anything, NaN included.
        block_table: ``[requests, max_blocks]``, int32: the blocks of a request in order. Entries after the last needed
            block may hold anything.
        query_start_loc: ``[requests + 1]``, int32: first row of each request in ``query``, and the end of the last one.
        seq_lens: ``[requests]``, int32: number of cached tokens of each request, including the new ones.
        max_query_len: largest number of new tokens of a request, or more.
        max_seq_len: largest of ``seq_lens``, or more.
        topk: largest number of tokens that a query attends to.
        out: ``[tokens, topk]``, int32, or ``None`` for a new tensor. Overwritten, except rows that no request covers.
        key_scales: ``[blocks, block_size, dim / 128 rounded up]``, float32, a view in any strides, as written by
            ``index_key_write``; ``None`` for other dtypes.

    Returns:
        ``[tokens, topk]``, int32: ``out`` if given. Positions in the query's request, in ascending order, then -1 if
        the query has fewer. Rows that no request covers are unspecified in a new tensor.
    """
    if out is None:
        out = query.new_full((query.shape[0], topk), -1, dtype=torch.int32)
    wide, block_size = torch.promote_types(query.dtype, torch.float32), key_cache.shape[1]
    numbers: list[int] = torch.cat((query_start_loc, seq_lens)).tolist()
    starts, lengths = numbers[: len(query_start_loc)], numbers[len(query_start_loc) :]
    for request, length in enumerate(lengths):
        begin, end = starts[request], starts[request + 1]
        if begin == end:
            continue
        blocks = block_table[request, : -(-length // block_size)]
        keys = key_cache[blocks].flatten(0, 1)[:length].to(wide)
        if key_scales is not None:
            keys = keys * _spread(key_scales[blocks].flatten(0, 1)[:length].to(wide), keys.shape[-1])
        step = max(1, SCORES_AT_ONCE // max(1, query.shape[1] * length))
        for row in range(begin, end, step):
            rows = slice(row, min(row + step, end))
            heads = query[rows].to(wide)
            if key_scales is not None:
                rounded, units = _in_fp8(heads)
                heads = rounded.to(wide) * _spread(units, heads.shape[-1])
            products = torch.einsum("qhd,kd->qhk", heads, keys).relu()
            scores = torch.einsum("qh,qhk->qk", weights[rows].to(wide), products)
            places = torch.arange(rows.start, rows.stop, device=keys.device) - end + length
            hidden = torch.arange(length, device=keys.device) > places[:, None]
            best = scores.masked_fill(hidden, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
            listed = best[:, :topk]
            listed = listed.masked_fill(listed > places[:, None], length).sort(dim=-1).values
            out[rows] = -1
            out[rows, : listed.shape[1]] = listed.masked_fill(listed == length, -1).to(out.dtype)
    return out


def _attend_work(
    query: Tensor, kv_cache: Tensor, positions: Tensor, query_start_loc: Tensor, kv_lora_rank: int
) -> Work:
    rows = int(query_start_loc[-1])
    listed = int((positions[:rows] >= 0).sum())
    heads, width = query.shape[1], kv_cache.shape[-1]
    moved = rows * (heads * (width + kv_lora_rank) * query.element_size() + 4 * positions.shape[1])
    return Work(moved + listed * width * kv_cache.element_size(), 2 * listed * heads * (width + kv_lora_rank))


@operator(
    writes={"out": Write(Access.OUTPUT)},
    modes=MODES,
    fake=latent_result,
    samples=sparse.attention_samples,
    probes=sparse.attention_probes,
    shapes=shapes.sparse_latent,
    aliases=("sparse_flash_mla", "flash_mla_sparse"),
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=queries_workload,
    phases=True,
    work=_attend_work,
)
def mla_sparse(
    query: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    kv_lora_rank: int,
    out: Tensor | None = None,
    cache_scale: float | None = None,
    query_rope: Tensor | None = None,
) -> Tensor:
    """Latent attention in its absorbed form over listed tokens of the paged latent cache.

    As in ``mla_decode``, but each query attends to the tokens in its row of ``positions``, whatever their order and its
    own position.

    Args:
        query: ``[tokens, heads, kv_lora_rank + rope_dim]``, floating point: the query of each head, multiplied by the
            key projection, then its rotary part, unless ``query_rope`` is given.
        kv_cache: ``[blocks, block_size, kv_lora_rank + rope_dim]``, a view in any strides. Unlisted slots may hold
            anything, NaN included.
        positions: ``[tokens, topk]``, int32: positions in the query's request, each at most once, followed by negative
            numbers as padding.
        block_table: ``[requests, max_blocks]``, int32: the blocks of a request in order. Entries that no listed token
            needs may hold anything.
        query_start_loc: ``[requests + 1]``, int32: first row of each request in ``query``, and the end of the last one.
        max_query_len: largest number of new tokens of a request, or more.
        scale: factor of the scores, from the model's unabsorbed head dimension.
        kv_lora_rank: length of the latent part of a row.
        out: ``[tokens, heads, kv_lora_rank]``, or ``None`` for a new tensor. Overwritten, except rows that no request
            covers.
        cache_scale: scale of a float8_e4m3fn cache: a row is ``cache_scale * stored``; ``None`` for other dtypes.
        query_rope: ``[tokens, heads, rope_dim]``, dtype of ``query``, a view in any strides: the rotary part, if
            ``query`` lacks it.

    Returns:
        ``[tokens, heads, kv_lora_rank]``, dtype of ``query``: ``out`` if given. Zeros if a row lists nothing. Rows that
        no request covers are unspecified in a new tensor.
    """
    whole = query if query_rope is None else torch.cat((query, query_rope), dim=-1)
    wide, block_size = torch.promote_types(query.dtype, torch.float32), kv_cache.shape[1]
    if out is None:
        out = query.new_zeros((*query.shape[:2], kv_lora_rank))
    if not len(block_table):
        return out
    tokens = torch.arange(len(whole), device=query.device, dtype=query_start_loc.dtype)
    request = (torch.searchsorted(query_start_loc, tokens, right=True) - 1).clamp(max=len(block_table) - 1)
    covered = (tokens < query_start_loc[-1])[:, None]
    step = max(1, SCORES_AT_ONCE // max(1, positions.shape[1] * (kv_cache.shape[-1] + query.shape[1])))
    for rows in map(slice, range(0, len(whole), step), range(step, len(whole) + step, step)):
        listed = (positions[rows] >= 0) & covered[rows]
        position = positions[rows].clamp(min=0).masked_fill(~listed, 0).long()
        blocks = block_table[request[rows, None], position // block_size].masked_fill(~listed, 0).long()
        found = kv_cache[blocks, position % block_size].to(wide).masked_fill(~listed[..., None], 0)
        keys = found if cache_scale is None else found * cache_scale
        scores = torch.einsum("qhd,qkd->qhk", whole[rows].to(wide), keys) * scale
        weights = scores.masked_fill(~listed[:, None], float("-inf")).softmax(dim=-1)
        weights = weights.masked_fill(~listed[:, None], 0)  # an empty row has no sum to divide by
        attended = torch.einsum("qhk,qkd->qhd", weights, keys[..., :kv_lora_rank]).to(query.dtype)
        out[rows] = torch.where(covered[rows, None], attended, out[rows])
    return out
