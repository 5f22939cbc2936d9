"""References of multi-head latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import SCORES_AT_ONCE, paged_attention


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
) -> Tensor:
    """See :data:`fl_dispatch.ops.mla.mla_decode`: paged attention with one key-value head, whose values are the first
    part of its keys.
    """
    keys = kv_cache.unsqueeze(2)
    return paged_attention(
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
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.mla.mla_prefill`. Waits for the device once, to read the lengths."""
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
            # The position of the request's last query is that of its last key.
            places = torch.arange(rows.start, rows.stop, device=keys.device) - end + len(keys)
            scores = torch.einsum("qhd,khd->hqk", query[rows].to(wide), keys) * scale
            if causal:
                hidden = torch.arange(len(keys), device=keys.device) > places[:, None]
                scores = scores.masked_fill(hidden, float("-inf"))
            lse[:, rows] = scores.logsumexp(dim=-1)
            # A row that sees nothing has scores of -inf only, and a sum of -inf: its weights are zero, not undefined.
            weights = torch.exp(scores - lse[:, rows, None].clamp_min(torch.finfo(wide).min))
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out, lse
