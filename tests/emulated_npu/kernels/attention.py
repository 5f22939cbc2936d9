"""Emulated attention: one product of scores, softmax and values for each sequence, behind four operators."""

from __future__ import annotations

import math
from typing import Any

import torch

from . import (
    FLOAT,
    HALF,
    kernel,
    require,
    require_contiguous,
    require_default,
    require_dtype,
    require_same_dtype,
    waived,
)
from .scores import UNBOUNDED, Sparsity, attend
from .sequences import LAYOUTS, Pages, from_sequences, sequences, to_sequences


def _check_sizes(size: int, value: int, packed: bool, rope: bool, waive: bool) -> None:
    """Documented head sizes of query and key, and of value."""
    if waive:
        require(size % 16 == 0 and value % 16 == 0, f"D is {size} and {value}, no multiples of 16")
    elif rope:
        require(size in (128, 512) and value == size, f"with query_rope, D is 128 or 512, not {size} and {value}")
    elif packed:
        require(
            (size, value) in ((128, 128), (192, 128), (192, 192)),
            f"layout TND takes D 128, or 192 with values of 128 or 192, not {size} and {value}",
        )
    else:
        require(size <= 512 and size % 16 == 0, f"D is {size}, no multiple of 16 up to 512")
        require(value == size, f"key and value must have one shape; D is {size} and {value}")


def fused_infer_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None,
    key_rope: torch.Tensor | None,
    atten_mask: torch.Tensor | None,
    query_lengths: list[int] | None,
    kv_lengths: list[int] | None,
    block_table: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    scale: float,
    before: int,
    after: int,
    input_layout: str,
    sparse_mode: int,
    block_size: int,
    with_lse: bool,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The computation of both versions of the operator, with the rules that they share."""
    kv_heads = kv_heads or heads
    require(input_layout in LAYOUTS, f"input_layout={input_layout!r} is not emulated; {', '.join(LAYOUTS)} are")
    require_dtype("query", query, HALF)
    require_same_dtype(query=query, key=key, value=value)
    require_contiguous(query=query, key=key, value=value, atten_mask=atten_mask, query_rope=query_rope)
    require_contiguous(key_rope=key_rope)
    latent = query_rope is not None and kv_heads == 1
    most = 128 if latent else 64  # the docstring of version two names up to 128 heads of a query with query_rope
    require(
        heads % kv_heads == 0 and heads // kv_heads <= most, f"{heads} heads of {kv_heads} KV heads; {most} share one"
    )
    require(heads <= 256, f"{heads} heads, above 256")
    if atten_mask is not None:
        masks = (torch.bool, torch.int8, torch.uint8)
        require(atten_mask.dtype in masks, f"atten_mask is {atten_mask.dtype}, not bool, int8 or uint8")
    require((query_rope is None) == (key_rope is None), "query_rope and key_rope must be given together")
    layout, output_layout = LAYOUTS[input_layout]
    packed = layout in ("TND", "NTD")
    q = to_sequences(query, layout, heads)
    rope = query_rope is not None
    queries = q.shape[-3]
    pages = Pages(block_table, block_size, kv_heads) if block_table is not None else None
    caches = [key, value] + ([key_rope] if key_rope is not None else [])
    if pages is not None:
        require(kv_lengths is not None, "actual_seq_lengths_kv must be given with block_table")
        require(pages.kv_heads > 0, "num_key_value_heads")
        for cache in caches:
            pages.check(cache, layout, queries, q.shape[-1] == 512)
        sizes = [cache.shape[-1] // (1 if cache.dim() == 4 else kv_heads) for cache in (key, value)]
    else:
        sizes = [to_sequences(tensor, layout, kv_heads).shape[-1] for tensor in (key, value)]
    require(sizes[0] == q.shape[-1], f"query has D {q.shape[-1]}, key {sizes[0]}")
    _check_sizes(sizes[0], sizes[1], packed, rope, waived("head_size"))
    if rope:
        assert query_rope is not None
        q_rope = to_sequences(query_rope, layout, heads)
        require(q_rope.shape[-1] == 64 or waived("head_size"), f"query_rope has D {q_rope.shape[-1]}, not 64")
        require(q_rope.shape[:-1] == q.shape[:-1], "query_rope must have query's shape but for D")
        if q.shape[-1] != 128:
            require(kv_heads == 1, f"{kv_heads} KV heads with a latent query, not 1")
            require(heads.bit_count() == 1 and heads <= 128, f"{heads} heads, not a power of two up to 128")
            require(sparse_mode in (0, 3, 4), f"sparse_mode={sparse_mode} with a latent query, not 0, 3 or 4")
            require(not with_lse, "softmax_lse is not there with a latent query")
        q = torch.cat((q, q_rope), -1)
    if sink is not None:
        require(packed, f"learnable_sink needs TND or NTD_TND, not {input_layout}")
        require(sizes[1] <= 128, f"learnable_sink needs values of D up to 128, not {sizes[1]}")
        require(sink.dtype == torch.bfloat16 and sink.shape == (heads,), f"learnable_sink must be bfloat16 [{heads}]")
    one = not packed and queries == 1 and not rope  # then sparse_mode and the window have no effect, as documented
    if one:
        full = atten_mask if sparse_mode in (0, 1) else None
        sparsity = Sparsity(1 if full is not None else 0, _one_query(full), UNBOUNDED, UNBOUNDED)
    else:
        sparsity = Sparsity(sparse_mode, atten_mask, before, after)
    sparsity.check()
    output = torch.empty(*q.shape[:-1], sizes[1], dtype=query.dtype)
    lse = torch.empty(*q.shape[:-1], dtype=torch.float32)
    for number, where, length, keys in sequences(q, caches, layout, kv_heads, query_lengths, kv_lengths, pages):
        rows, k, v = q[where][:length], keys[0], keys[1]
        if rope:
            k = torch.cat((k, keys[2]), -1)
        made = attend(rows, k, v, scale, sparsity.hidden(number, len(rows), len(k)), sink)
        output[where][:length] = made.output.to(query.dtype)
        output[where][length:] = 0
        lse[where][:length] = made.lse
        lse[where][length:] = torch.inf
    return from_sequences(output, output_layout), _lse(lse, packed) if with_lse else torch.empty(0)


def _one_query(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask (B, KV_S) as (B, 1, KV_S)."""
    return mask[:, None] if mask is not None and mask.dim() == 2 else mask


def _lse(lse: torch.Tensor, packed: bool) -> torch.Tensor:
    """[T, N, 1], or [B, N, S, 1]."""
    return lse[..., None] if packed else lse.transpose(1, 2)[..., None].contiguous()


@kernel("npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Source: op-plugin's page, the wheel's docstring and Meta kernel.

    Layouts BSH, BSND, BNSD, BNSD_BSND, TND, TND_NTD, NTD_TND; paged keys; MLA by query_rope. Under TND the query's
    lengths are cumulative, the keys' cumulative too, but with pages one for each sequence.
    Refused: dtypes beside float16 and bfloat16; tensors that are not contiguous; block sizes, head sizes and masks
    that the page excludes; lengths on the device; anything quantized, pse_shift, padding on the left, prefixes.
    Assumed: float32 inside. sparse_mode 0 counts its window from the upper left corner, 4 from the lower right.
    A query without keys gives 0, with an infinite lse; queries beyond a sequence's length give 0. One query a
    sequence ignores sparse_mode and window unless the layout is TND, for which the page names no such rule.
    Without softmax_lse_flag the page says one element, the Meta kernel none, which is taken.
    """
    require_default(**others)
    require(inner_precise in (0, 1, 2, 3), f"inner_precise={inner_precise}, not 0 to 3")
    return fused_infer_attention(
        query,
        key,
        value,
        query_rope=query_rope,
        key_rope=key_rope,
        atten_mask=atten_mask,
        query_lengths=actual_seq_lengths,
        kv_lengths=actual_seq_lengths_kv,
        block_table=block_table,
        heads=num_heads,
        kv_heads=num_key_value_heads,
        scale=scale,
        before=pre_tokens,
        after=next_tokens,
        input_layout=input_layout,
        sparse_mode=sparse_mode,
        block_size=block_size,
        with_lse=softmax_lse_flag,
    )


@kernel("npu_fused_infer_attention_score_v2")
def fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the first version, with learnable sinks: a score of each head that takes its share of the softmax.

    Source: op-plugin's page. Refused beyond the first version's: a sink that is not bfloat16 [heads], sinks in other
    layouts than TND and NTD_TND or with values above 128. Assumed: the sink is not scaled; sparse_mode 9 and
    quantization are not emulated.
    """
    require_default(**others)
    require(inner_precise in (0, 1, 2, 3), f"inner_precise={inner_precise}, not 0 to 3")
    return fused_infer_attention(
        query,
        key,
        value,
        query_rope=query_rope,
        key_rope=key_rope,
        atten_mask=atten_mask,
        query_lengths=actual_seq_qlen,
        kv_lengths=actual_seq_kvlen,
        block_table=block_table,
        heads=num_query_heads,
        kv_heads=num_key_value_heads,
        scale=softmax_scale,
        before=pre_tokens,
        after=next_tokens,
        input_layout=input_layout,
        sparse_mode=sparse_mode,
        block_size=block_size,
        with_lse=return_softmax_lse,
        sink=learnable_sink,
    )


@kernel("npu_fusion_attention")
def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED,
    next_tockens: int = UNBOUNDED,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Attention, the softmax's maxima and sums (eight equal columns), an empty tensor, three zeros.

    Source: op-plugin's page and the Meta kernel. Layouts BSND, BNSD and TND; float32 is allowed.
    Refused: dropout, pse, prefixes, a mask that is neither bool nor uint8, lengths that are not cumulative.
    Assumed: float32 inside; the windows as in ``npu_fused_infer_attention_score``; a query without keys gives 0.
    """
    require_default(pse=pse, padding_mask=padding_mask, prefix=prefix, dropout_mask=dropout_mask)
    require_dtype("query", query, FLOAT)
    require_same_dtype(query=query, key=key, value=value)
    require(keep_prob == 1, f"keep_prob={keep_prob} is not emulated")
    require(input_layout in ("BSND", "BNSD", "TND"), f"input_layout={input_layout!r} is not emulated")
    require(softmax_layout in ("", "TND"), f"softmax_layout={softmax_layout!r}, not '' or 'TND'")
    if atten_mask is not None:
        require(atten_mask.dtype in (torch.bool, torch.uint8), f"atten_mask is {atten_mask.dtype}, not bool or uint8")
    if sink is not None:
        require(sink.dtype == torch.float32 and sink.shape == (head_num,), f"sink must be float32 [{head_num}]")
    packed = input_layout == "TND"
    kv_heads = key.shape[1 if input_layout != "BSND" else 2]
    require(head_num % kv_heads == 0, f"{head_num} heads of {kv_heads} KV heads")
    q = to_sequences(query, input_layout, head_num)
    require(packed or actual_seq_qlen is actual_seq_kvlen is None, f"lengths are for TND, not {input_layout}")
    sparsity = Sparsity(sparse_mode, atten_mask, pre_tockens, next_tockens)
    sparsity.check()
    output = torch.empty(*q.shape[:-1], value.shape[-1], dtype=query.dtype)
    maximum, total = (torch.empty(q.shape[:-1]) for _ in range(2))
    for number, where, _, (k, v) in sequences(
        q, [key, value], input_layout, kv_heads, actual_seq_qlen, actual_seq_kvlen, None
    ):
        made = attend(q[where], k, v, scale, sparsity.hidden(number, len(q[where]), len(k)), sink)
        output[where], maximum[where], total[where] = made.output.to(query.dtype), made.maximum, made.total

    def eight(rows: torch.Tensor) -> torch.Tensor:
        if not packed:
            rows = rows.transpose(1, 2)
        elif softmax_layout != "TND":  # then the documented order is heads before tokens, in the shape [T, N, 8]
            rows = rows.t().reshape(rows.shape)
        return rows[..., None].expand(*rows.shape, 8).contiguous()

    nothing = torch.empty(0, dtype=query.dtype)
    return from_sequences(output, input_layout), eight(maximum), eight(total), nothing, 0, 0, 0


@kernel("npu_attention_update")
def attention_update(
    lse: list[torch.Tensor], local_out: list[torch.Tensor], update_type: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys. Source: op-plugin's page.

    Refused: more than 16 parts, an lse that is not float32 [rows], D no multiple of 8 from 8 to 512.
    Assumed: with update_type 0 the second result is not written (NaN); an infinite lse weighs as nothing.
    """
    require(update_type in (0, 1), f"update_type={update_type}, not 0 or 1")
    require(1 <= len(lse) == len(local_out) <= 16, f"{len(lse)} and {len(local_out)} parts; one to 16 are wanted")
    for one, out in zip(lse, local_out, strict=True):
        require(one.dtype == torch.float32, f"lse is {one.dtype}, not float32")
        require(one.dim() == 1 and out.dim() == 2 and len(one) == len(out), "lse is [rows], local_out [rows, D]")
        require(8 <= out.shape[1] <= 512 and out.shape[1] % 8 == 0, f"D is {out.shape[1]}, no multiple of 8 to 512")
        require_dtype("local_out", out, FLOAT)
    parts = torch.stack(lse)
    parts = torch.where(parts == math.inf, -math.inf, parts)
    merged = torch.logsumexp(parts, 0)
    weights = torch.nan_to_num(torch.exp(parts - merged))
    out = sum(w[:, None] * o.float() for w, o in zip(weights, local_out, strict=True))
    assert isinstance(out, torch.Tensor)
    return out.to(local_out[0].dtype), merged if update_type == 1 else torch.full_like(merged, torch.nan)
