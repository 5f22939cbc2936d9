"""Emulated attention: one product of scores, softmax and values for each sequence, behind three operators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
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

COMPRESSED = 2048
"""Rows and columns of the causal mask that sparse modes 2, 3 and 4 take."""
UNBOUNDED = 2147483647


@dataclass(frozen=True)
class Sparsity:
    """Which scores count: ``sparse_mode`` with its mask and window."""

    mode: int
    mask: torch.Tensor | None
    before: int
    after: int

    def check(self) -> None:
        require(self.mode in (0, 1, 2, 3, 4), f"sparse_mode={self.mode} is not one of 0 to 4")
        if self.mode == 1:
            require(self.mask is not None, "sparse_mode=1 needs atten_mask")
        if self.mode >= 2:
            require(self.mask is not None, f"sparse_mode={self.mode} needs the atten_mask of 2048 x 2048")
            assert self.mask is not None
            shape = tuple(self.mask.shape)
            wanted = (COMPRESSED, COMPRESSED)
            require(shape in (wanted, (1, *wanted), (1, 1, *wanted)), f"atten_mask is {shape}, not 2048 x 2048")
            triangle = torch.ones(wanted, dtype=torch.bool).triu_(1)
            require(
                torch.equal(self.mask.view(wanted) != 0, triangle),
                "atten_mask must be 1 above the diagonal and 0 elsewhere",
            )

    def hidden(self, batch: int, queries: int, keys: int) -> torch.Tensor | None:
        """True where a score does not count, [queries, keys]; None if all count."""
        if self.mode == 0 and self.mask is None:
            return None
        row, column = torch.arange(queries)[:, None], torch.arange(keys)
        if self.mode in (0, 1):
            given = self._full(batch, queries, keys)
            if self.mode == 0:
                given = given | (column < row - self.before) | (column > row + self.after)
            return given
        if self.mode == 2:
            return column > row
        last = row + keys - queries
        if self.mode == 3:
            return column > last
        return (column < last - self.before) | (column > last + self.after)

    def _full(self, batch: int, queries: int, keys: int) -> torch.Tensor:
        mask = self.mask
        assert mask is not None
        while mask.dim() > 2:
            mask = mask[batch if mask.shape[0] > 1 else 0]
        require(
            mask.shape[0] >= queries and mask.shape[1] >= keys,
            f"atten_mask is {tuple(mask.shape)}, and a sequence has {queries} queries and {keys} keys",
        )
        return mask[:queries, :keys] != 0


@dataclass
class Attended:
    """Attention of one sequence: output [queries, heads, D], the rest [queries, heads] in float32."""

    output: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor

    @property
    def lse(self) -> torch.Tensor:
        """Log of the sum of exponentials; infinite where no key counts."""
        lse = self.total.log() + self.maximum
        return torch.where(self.total == 0, torch.inf, lse)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None,
    sink: torch.Tensor | None = None,
) -> Attended:
    """Softmax(scale * Q K) V of one sequence, in float32.

    Args:
        query: [queries, heads, D]
        key, value: [keys, KV heads, D]; each serves heads / KV heads consecutive heads.
        hidden: scores that do not count, [queries, keys].
        sink: a score for each head that takes its share of the softmax and has no value.
    """
    queries, heads, _ = query.shape
    keys, kv_heads, size = value.shape
    groups = heads // kv_heads
    q, k, v = query.float(), key.float().repeat_interleave(groups, 1), value.float().repeat_interleave(groups, 1)
    scores = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0)) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    if keys == 0:
        empty = torch.zeros(queries, heads)
        return Attended(torch.zeros(queries, heads, size), empty, empty)
    maximum = scores.amax(-1)
    if sink is not None:
        maximum = torch.maximum(maximum, sink.float()[:, None])
    maximum = torch.where(maximum == -math.inf, 0.0, maximum)
    weights = torch.exp(scores - maximum[..., None])
    total = weights.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink.float()[:, None] - maximum)
    output = torch.matmul(weights, v.transpose(0, 1)) / torch.where(total == 0, 1.0, total)[..., None]
    return Attended(output.transpose(0, 1), maximum.t(), total.t())


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
    """What both versions of the operator compute, with the rules that they share."""
    kv_heads = kv_heads or heads
    require(input_layout in LAYOUTS, f"input_layout={input_layout!r} is not emulated; {', '.join(LAYOUTS)} are")
    require_dtype("query", query, HALF)
    require_same_dtype(query=query, key=key, value=value)
    require_contiguous(query=query, key=key, value=value, atten_mask=atten_mask, query_rope=query_rope)
    require_contiguous(key_rope=key_rope)
    require(heads % kv_heads == 0 and heads // kv_heads <= 64, f"{heads} heads of {kv_heads} KV heads; 64 share one")
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
    for number, where, length, keys in _sequences(q, caches, layout, kv_heads, query_lengths, kv_lengths, pages):
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


def _sequences(
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
    for number, where, _, (k, v) in _sequences(
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
