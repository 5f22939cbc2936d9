"""Multi-head latent attention: its two forms, over a paged latent cache and over multi-head keys and values.

DeepSeek-V2 (arXiv 2405.04434) caches one latent row per token instead of keys and values: ``kv_lora_rank`` elements
from which both are projected, and a rotary part that all heads share. Decoding absorbs the projections into the query
and the output, so all heads attend over the latent rows. A prefill projects keys and values first, which costs fewer
operations for long queries. The cache is written by ``kv_cache_write`` with one key-value head: the latent as key, the
rotary part as value, and two views of the cache. A float8_e4m3fn cache has one scale for whole rows, passed to a write
as both scales. Prefill reads no cache: its caller multiplies cached rows by that scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import SCORES_AT_ONCE, TOLERANCES, paged_attention
from .declaration import SEVERAL_ROUNDINGS, Access, Mode, Work, Write, decode, operator, prefill
from .inputs import latent, shapes

MODES = frozenset({Mode.OPAQUE, Mode.EAGER})
LATENT_SCALES = ("cache_scale",)
"""Parameters that a call of ``mla_decode`` passes with an fp8 cache."""


def _visible_pairs(queries: Sequence[int], keys: Sequence[int], causal: bool) -> int:
    """Return the pairs of a query and a key that it sees, over all requests; the last query is at the last key."""
    pairs = 0
    for rows, length in zip(queries, keys, strict=True):
        seen = (max(0, length - rows + row + 1) for row in range(rows))
        pairs += sum(seen) if causal else rows * length
    return pairs


def latent_result(query: Tensor, kv_lora_rank: int, out: Tensor | None) -> Tensor:
    """Return an empty result with the latent part for each query."""
    return query.new_empty((*query.shape[:2], kv_lora_rank)) if out is None else out


def _decode_work(
    query: Tensor, kv_cache: Tensor, query_start_loc: Tensor, seq_lens: Tensor, kv_lora_rank: int, causal: bool
) -> Work:
    rows: list[int] = query_start_loc.diff().tolist()
    lengths = [length if new else 0 for new, length in zip(rows, seq_lens.tolist(), strict=True)]
    heads, width = query.shape[1], kv_cache.shape[-1]
    pairs = _visible_pairs(rows, lengths, causal)
    moved = sum(rows) * heads * (width + kv_lora_rank) * query.element_size()
    return Work(moved + sum(lengths) * width * kv_cache.element_size(), 2 * pairs * heads * (width + kv_lora_rank))


@operator(
    hints=("query_start_loc_host", "seq_lens_host"),
    later=(*LATENT_SCALES, "query_rope"),
    writes={"out": Write(Access.OUTPUT)},
    modes=MODES,
    fake=latent_result,
    samples=latent.decode_samples,
    probes=latent.decode_probes,
    shapes=shapes.latent_decode,
    aliases=("flash_mla", "mla_attention"),
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=decode,
    phases=True,
    work=_decode_work,
    waits=True,
)
def mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    kv_lora_rank: int,
    out: Tensor | None = None,
    causal: bool = True,
    cache_scale: float | None = None,
    query_rope: Tensor | None = None,
    query_start_loc_host: Sequence[int] | None = None,
    seq_lens_host: Sequence[int] | None = None,
) -> Tensor:
    """Latent attention in its absorbed form: all heads attend over the paged latent cache.

    Query ``i`` of a request stands at ``seq_len - query_len + i``, and the cache already holds the new tokens. The
    score of a token is ``scale`` times the product of the query with its whole latent row; the value is the first
    ``kv_lora_rank`` elements of that row (DeepSeek-AI, arXiv 2405.04434).

    Args:
        query: ``[tokens, heads, kv_lora_rank + rope_dim]``, floating point: the query of each head, multiplied by the
            key projection, then its rotary part, unless ``query_rope`` is given.
        kv_cache: ``[blocks, block_size, kv_lora_rank + rope_dim]``, a view in any strides. Slots that hold no token of
            a request may hold anything, NaN included.
        block_table: ``[requests, max_blocks]``, int32: the blocks of a request in order. Entries after the last needed
            block may hold anything.
        query_start_loc: ``[requests + 1]``, int32: first row of each request in ``query``, and the end of the last one.
        seq_lens: ``[requests]``, int32: number of cached tokens of each request, including the new ones.
        max_query_len: largest number of new tokens of a request, or more.
        max_seq_len: largest of ``seq_lens``, or more.
        scale: factor of the scores, from the model's unabsorbed head dimension.
        kv_lora_rank: length of the latent part of a row.
        out: ``[tokens, heads, kv_lora_rank]``, or ``None`` for a new tensor. Overwritten, except rows that no request
            covers.
        causal: whether a query sees no token after its own position.
        cache_scale: scale of a float8_e4m3fn cache: a row is ``cache_scale * stored``; ``None`` for other dtypes.
        query_rope: ``[tokens, heads, rope_dim]``, dtype of ``query``, a view in any strides: the rotary part, if
            ``query`` lacks it.
        query_start_loc_host: hint: the numbers in ``query_start_loc``, for kernels that take them as integers.
        seq_lens_host: hint: the numbers in ``seq_lens``, for kernels that take them as integers.

    Returns:
        ``[tokens, heads, kv_lora_rank]``, dtype of ``query``: ``out`` if given. Rows that see no cached token are
        unspecified, and in a new tensor also rows that no request covers.
    """
    keys = kv_cache.unsqueeze(2)
    return paged_attention.reference(
        query if query_rope is None else torch.cat((query, query_rope), dim=-1),
        keys,
        keys[..., :kv_lora_rank],
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        scale,
        out,
        causal,
        key_scale=cache_scale,
        value_scale=cache_scale,
    )


def _prefill_fake(query: Tensor, value: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=wide)
    return query.new_empty((*query.shape[:2], value.shape[-1])) if out is None else out, lse


def _prefill_work(
    query: Tensor, key: Tensor, value: Tensor, query_start_loc: Tensor, key_start_loc: Tensor, causal: bool
) -> Work:
    rows: list[int] = query_start_loc.diff().tolist()
    lengths: list[int] = key_start_loc.diff().tolist()
    heads, dims = query.shape[1], key.shape[-1] + value.shape[-1]
    moved = (sum(rows) + sum(lengths)) * heads * dims * query.element_size() + sum(rows) * heads * 4
    return Work(moved, 2 * _visible_pairs(rows, lengths, causal) * heads * dims)


@operator(
    hints=("query_start_loc_host", "key_start_loc_host"),
    writes={"out": Write(Access.OUTPUT)},
    modes=MODES,
    fake=_prefill_fake,
    samples=latent.prefill_samples,
    probes=latent.prefill_probes,
    shapes=shapes.latent_prefill,
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=prefill,
    phases=True,
    work=_prefill_work,
    waits=True,
)
def mla_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    max_query_len: int,
    max_key_len: int,
    scale: float,
    out: Tensor | None = None,
    causal: bool = True,
    query_start_loc_host: Sequence[int] | None = None,
    key_start_loc_host: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Latent attention in its multi-head form: attention over contiguous keys and values of several requests.

    The keys are those of the new tokens, or of one chunk of the cached context. Results over several chunks are merged
    by their log-sum-exp: ``out = sum(exp(lse_c - lse) * out_c)`` with ``lse = log(sum(exp(lse_c)))`` (Ye et al., arXiv
    2501.01005, section 2.2).

    Args:
        query: ``[tokens, heads, head_dim]``, floating point.
        key: ``[keys, heads, head_dim]``, dtype of ``query``.
        value: ``[keys, heads, value_dim]``, dtype of ``query``, any strides.
        query_start_loc: ``[requests + 1]``, int32: first row of each request in ``query``, and the end of the last one.
        key_start_loc: ``[requests + 1]``, int32: the same for ``key`` and ``value``. A request may have no key.
        max_query_len: largest number of queries of a request, or more.
        max_key_len: largest number of keys of a request, or more.
        scale: factor of the scores.
        out: ``[tokens, heads, value_dim]``, or ``None`` for a new tensor. Overwritten, except rows that no request
            covers.
        causal: whether a query sees no key after its own position; a request's last query is at its last key.
        query_start_loc_host: hint: the numbers in ``query_start_loc``, for kernels that take them as integers.
        key_start_loc_host: hint: the numbers in ``key_start_loc``, for kernels that take them as integers.

    Returns:
        ``(out, lse)``: ``[tokens, heads, value_dim]`` in the dtype of ``query``, ``out`` if given, and the log-sum-exp
        of the scores, ``[heads, tokens]``, float32 (float64 for float64). A row that sees no key has zero and minus
        infinity. Rows that no request covers are unspecified.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=wide)
    if out is None:
        out = query.new_zeros((*query.shape[:2], value.shape[-1]))
    numbers: list[int] = torch.cat((query_start_loc, key_start_loc)).tolist()
    starts, key_starts = numbers[: len(query_start_loc)], numbers[len(query_start_loc) :]
    for begin, end, first, last in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        keys, values = key[first:last].to(wide), value[first:last].to(wide)
        step = max(1, SCORES_AT_ONCE // max(1, query.shape[1] * len(keys)))
        for row in range(begin, end, step):
            rows = slice(row, min(row + step, end))
            # A request's last query is at the position of its last key.
            places = torch.arange(rows.start, rows.stop, device=keys.device) - end + len(keys)
            scores = torch.einsum("qhd,khd->hqk", query[rows].to(wide), keys) * scale
            if causal:
                hidden = torch.arange(len(keys), device=keys.device) > places[:, None]
                scores = scores.masked_fill(hidden, float("-inf"))
            lse[:, rows] = scores.logsumexp(dim=-1)
            # A row that sees nothing has only scores of -inf, and a sum of -inf: its weights are zero, not undefined.
            weights = torch.exp(scores - lse[:, rows, None].clamp_min(torch.finfo(wide).min))
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out, lse
