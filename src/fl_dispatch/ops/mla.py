"""Multi-head latent attention: its two forms, over a paged latent cache and over multi-head keys and values.

DeepSeek-V2 (arXiv 2405.04434) caches one latent row a token instead of keys and values: ``kv_lora_rank`` elements from
which both are projected, and a rotary part that every head shares. Decoding absorbs the projections into the query and
the output, so all heads attend over the latent itself; a prefill projects keys and values first, which costs fewer
operations for long queries. The cache is written by ``kv_cache_write`` with one key-value head: the latent as key, the
rotary part as value, and two views of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .attention import TOLERANCES
from .declaration import Access, Mode, Sample, Work, Workload, Write, operator

MODES = frozenset({Mode.OPAQUE, Mode.EAGER})


def _visible_pairs(queries: Sequence[int], keys: Sequence[int], causal: bool) -> int:
    """Pairs of a query and a key that it sees, over all requests; the last query stands at the last key."""
    pairs = 0
    for rows, length in zip(queries, keys, strict=True):
        seen = (max(0, length - rows + row + 1) for row in range(rows))
        pairs += sum(seen) if causal else rows * length
    return pairs


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _decode_fake(
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
) -> Tensor:
    return query.new_empty((*query.shape[:2], kv_lora_rank)) if out is None else out


def _decode_workload(query: Tensor, *args: object) -> Workload:
    return Workload(query.dtype, query.shape[0], "decode")


def _decode_work(
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
) -> Work:
    rows: list[int] = query_start_loc.diff().tolist()
    lengths = [length if new else 0 for new, length in zip(rows, seq_lens.tolist(), strict=True)]
    heads, width = query.shape[1], kv_cache.shape[-1]
    pairs = _visible_pairs(rows, lengths, causal)
    moved = sum(rows) * heads * (width + kv_lora_rank) * query.element_size()
    return Work(moved + sum(lengths) * width * kv_cache.element_size(), 2 * pairs * heads * (width + kv_lora_rank))


def _decode_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    def sample(
        label: str,
        requests: Sequence[tuple[int, int]],
        heads: int,
        rank: int,
        rope: int,
        *,
        block_size: int = 16,
        padding: int | None = None,
        causal: bool = True,
        row_stride: int | None = None,
        serving: bool = True,
    ) -> Sample:
        """``requests`` are (new tokens, all tokens). With ``padding``, ``out`` is given and has so many rows more."""
        rows, lengths = [new for new, _ in requests], [length for _, length in requests]
        blocks = [-(-length // block_size) for length in lengths]
        # Block 0 belongs to nobody: hosts point the unused entries of the table there.
        pages = (1 + torch.randperm(sum(blocks), generator=generator, dtype=torch.int32)).tolist()
        table = torch.zeros(len(requests), max(blocks, default=0) + 1, dtype=torch.int32)
        for row, count in zip(table, blocks, strict=True):
            row[:count] = torch.tensor([pages.pop() for _ in range(count)], dtype=torch.int32)
        tokens = sum(rows) + (padding or 0)
        args = (
            normal(tokens, heads, rank + rope),
            normal(1 + sum(blocks), block_size, row_stride or rank + rope)[..., : rank + rope],
            table.to(device),
            _starts(rows).to(device),
            torch.tensor(lengths, dtype=torch.int32).to(device),
            max(rows, default=0),
            max(lengths, default=0),
            (rank // 4 + rope) ** -0.5,
            rank,
            None if padding is None else normal(tokens, heads, rank),
            causal,
        )
        return Sample(label, args, serving)

    decode = [(1, length) for length in (1, 16, 17, 64, 129, 256, 333, 512)]
    yield sample("decode, 8 requests, 16 heads", decode, 16, 512, 64)
    yield sample("decode, 4 requests, 128 heads", decode[2:6], 128, 512, 64, block_size=64)
    yield sample("speculative decode, 3 tokens a request", [(3, 40), (3, 3), (3, 130)], 16, 512, 64)
    yield sample("decode with out, padded batch", [*decode[:4], (0, 0)], 8, 512, 64, padding=3)
    yield sample("mixed lengths, block size 1", [(1, 30), (5, 21), (17, 17)], 4, 256, 64, block_size=1)
    yield sample("not causal", [(4, 20), (4, 7)], 4, 64, 32, causal=False, serving=False)
    yield sample("rank 24, rotary part 8, odd heads", [(1, 9), (2, 5)], 3, 24, 8, serving=False)
    yield sample("cache row stride larger than the row", [(1, 40)], 4, 64, 16, row_stride=96, serving=False)
    yield sample("no rotary part", [(1, 18)], 4, 64, 0, serving=False)
    yield sample("one token", [(1, 1)], 2, 64, 16, serving=False)
    yield sample("empty batch", [], 4, 64, 16, serving=False)


@operator(
    hints=("query_start_loc_host", "seq_lens_host"),
    writes={"out": Write(Access.OUTPUT)},
    modes=MODES,
    fake=_decode_fake,
    samples=_decode_samples,
    tolerances=TOLERANCES,
    workload=_decode_workload,
    phases=True,
    work=_decode_work,
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
    query_start_loc_host: Sequence[int] | None = None,
    seq_lens_host: Sequence[int] | None = None,
) -> Tensor:
    """Latent attention in its absorbed form: all heads attend over the paged latent cache itself.

    Query ``i`` of a request stands at ``seq_len - query_len + i``, and the cache already holds the new tokens. The
    score of a token is ``scale`` times the product of the query with its whole latent row; the value is the first
    ``kv_lora_rank`` elements of that row (DeepSeek-AI, arXiv 2405.04434).

    Args:
        query: ``[tokens, heads, kv_lora_rank + rope_dim]``, floating point: the query of each head, multiplied by the
            key projection, then its rotary part.
        kv_cache: ``[blocks, block_size, kv_lora_rank + rope_dim]``, a view in any strides.
        block_table: ``[requests, max_blocks]``, int32: the blocks of a request in order. Entries behind the last needed
            block may hold anything.
        query_start_loc: ``[requests + 1]``, int32: first row of each request in ``query``, and the end of the last one.
        seq_lens: ``[requests]``, int32: cached tokens of each request, the new ones included.
        max_query_len: largest number of new tokens of a request, or more.
        max_seq_len: largest of ``seq_lens``, or more.
        scale: factor of the scores; that of the model's unabsorbed head dimension.
        kv_lora_rank: length of the latent part of a row.
        out: ``[tokens, heads, kv_lora_rank]``, or ``None`` for a new tensor. Overwritten, but for rows that no request
            covers.
        causal: a query sees no token behind its own position.
        query_start_loc_host: hint: the numbers in ``query_start_loc``, for kernels that take them as integers.
        seq_lens_host: hint: the numbers in ``seq_lens``, likewise.

    Returns:
        ``[tokens, heads, kv_lora_rank]``, dtype of ``query``: ``out`` where given. Rows that see no cached token are
        unspecified, and so are those that no request covers, in a new tensor.
    """
    raise NotImplementedError


def _prefill_fake(
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
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=wide)
    return query.new_empty((*query.shape[:2], value.shape[-1])) if out is None else out, lse


def _prefill_workload(query: Tensor, *args: object) -> Workload:
    return Workload(query.dtype, query.shape[0], "prefill")


def _prefill_work(
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
) -> Work:
    rows: list[int] = query_start_loc.diff().tolist()
    lengths: list[int] = key_start_loc.diff().tolist()
    heads, dims = query.shape[1], key.shape[-1] + value.shape[-1]
    moved = (sum(rows) + sum(lengths)) * heads * dims * query.element_size() + sum(rows) * heads * 4
    return Work(moved, 2 * _visible_pairs(rows, lengths, causal) * heads * dims)


def _prefill_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    def sample(
        label: str,
        requests: Sequence[tuple[int, int]],
        heads: int,
        head_dim: int,
        value_dim: int,
        *,
        padding: int | None = None,
        causal: bool = True,
        serving: bool = True,
    ) -> Sample:
        """``requests`` are (queries, keys). With ``padding``, ``out`` is given and has so many rows more."""
        rows, lengths = [queries for queries, _ in requests], [keys for _, keys in requests]
        tokens = sum(rows) + (padding or 0)
        # As hosts have it: values are a view of the projection that also holds most of the keys.
        projection = normal(sum(lengths), heads, head_dim + value_dim)
        key, value = torch.tensor_split(projection, (head_dim,), dim=-1)
        args = (
            normal(tokens, heads, head_dim),
            key.contiguous(),
            value,
            _starts(rows).to(device),
            _starts(lengths).to(device),
            max(rows, default=0),
            max(lengths, default=0),
            head_dim**-0.5,
            None if padding is None else normal(tokens, heads, value_dim),
            causal,
        )
        return Sample(label, args, serving)

    yield sample("prefill, 2 requests, new tokens", [(64, 64), (21, 21)], 16, 192, 128)
    yield sample("context chunk", [(17, 96), (7, 64)], 16, 192, 128, causal=False)
    yield sample("context chunk, some requests without", [(9, 20), (5, 0), (3, 17)], 8, 192, 128, causal=False)
    yield sample("with out, padded batch", [(17, 17), (5, 5)], 8, 192, 128, padding=3)
    yield sample("more keys than queries, causal", [(5, 30), (16, 33)], 8, 192, 128)
    yield sample("more queries than keys, causal", [(12, 5)], 2, 48, 32, serving=False)
    yield sample("head size 40, value 24, odd heads", [(6, 6)], 3, 40, 24, serving=False)
    yield sample("one token", [(1, 1)], 2, 64, 64, serving=False)
    yield sample("empty batch", [], 4, 64, 32, serving=False)


@operator(
    hints=("query_start_loc_host", "key_start_loc_host"),
    writes={"out": Write(Access.OUTPUT)},
    modes=MODES,
    fake=_prefill_fake,
    samples=_prefill_samples,
    tolerances=TOLERANCES,
    workload=_prefill_workload,
    phases=True,
    work=_prefill_work,
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
        value: ``[keys, heads, value_dim]``, likewise, any strides.
        query_start_loc: ``[requests + 1]``, int32: first row of each request in ``query``, and the end of the last one.
        key_start_loc: ``[requests + 1]``, int32: the same for ``key`` and ``value``. A request may have no key.
        max_query_len: largest number of queries of a request, or more.
        max_key_len: largest number of keys of a request, or more.
        scale: factor of the scores.
        out: ``[tokens, heads, value_dim]``, or ``None`` for a new tensor. Overwritten, but for rows that no request
            covers.
        causal: the last query of a request stands at its last key, and a query sees no key behind its own position.
        query_start_loc_host: hint: the numbers in ``query_start_loc``, for kernels that take them as integers.
        key_start_loc_host: hint: the numbers in ``key_start_loc``, likewise.

    Returns:
        ``(out, lse)``: ``[tokens, heads, value_dim]`` in the dtype of ``query``, ``out`` where given, and the
        log-sum-exp of the scores, ``[heads, tokens]``, float32 (float64 for float64). A row that sees no key has zero
        and minus infinity. Rows that no request covers are unspecified.
    """
    raise NotImplementedError
