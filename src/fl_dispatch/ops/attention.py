"""Attention over a paged key-value cache, and the choice of a host's attention class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from .declaration import STANDARD_TOLERANCE, Access, Mode, Sample, Tolerance, Work, Workload, Write, operator

MODES = frozenset({Mode.OPAQUE, Mode.EAGER})
STATE = Write(Access.STATE)
# The result is a mean of values, so it shrinks with the number of keys: the standard absolute error of the half types
# would accept anything for a long sequence, while the rounding of weights to the half type costs at most half a unit of
# the mean magnitude. In float32 an error of a score is a relative error of its weight, and the weighted values cancel.
TOLERANCES = MappingProxyType(
    {
        **STANDARD_TOLERANCE,
        torch.float32: Tolerance(2e-5, 1e-5),
        torch.float16: Tolerance(2e-3, 5e-4),
        torch.bfloat16: Tolerance(1.6e-2, 4e-3),
    }
)


def _caches(values: Tensor, kv_heads: int, head_dim: int, block_size: int, layout: str) -> tuple[Tensor, Tensor]:
    """Both caches as ``[blocks, block_size, kv_heads, dim]``, in one of the memory layouts of hosts."""
    if layout == "token-major":  # [blocks, block_size, kv_heads, dim], two tensors
        shaped = values.view(-1, block_size, kv_heads, values.shape[-1])
        key, value = torch.tensor_split(shaped, (head_dim,), dim=-1)
        return key.contiguous(), value.contiguous()
    if layout == "keys transposed":  # [blocks, kv_heads], then [head_dim, block_size] keys, [block_size, dim] values
        page = values.view(-1, kv_heads, block_size * values.shape[-1])
        key, value = torch.tensor_split(page, (head_dim * block_size,), dim=-1)
        key = key.view(len(page), kv_heads, head_dim, block_size).permute(0, 3, 1, 2)
        return key, value.view(len(page), kv_heads, block_size, -1).transpose(1, 2)
    # [blocks, kv_heads, block_size, dim], key and value side by side in one tensor
    shaped = values.view(-1, kv_heads, block_size, values.shape[-1]).transpose(1, 2)
    key, value = torch.tensor_split(shaped, (head_dim,), dim=-1)
    return key, value


def _write_fake(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    return None


def _write_workload(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> Workload:
    return Workload(key.dtype, slot_mapping.shape[0])


def _write_work(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> Work:
    slots = slot_mapping.shape[0]
    elements = slots * key.shape[1] * (key.shape[2] + value.shape[2])
    read = elements * key.element_size() + slots * slot_mapping.element_size()
    return Work(read + elements * key_cache.element_size(), 0)


def _write_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    def sample(
        label: str,
        tokens: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        blocks: int = 24,
        block_size: int = 16,
        layout: str = "head-major",
        consecutive: bool = False,
        skip: Sequence[int] = (),
        padding: int = 0,
        serving: bool = True,
    ) -> Sample:
        value_dim = value_dim or head_dim
        # As hosts have it: key and value are views of one projection.
        projection = normal(tokens + padding, kv_heads, head_dim + value_dim)
        key, value = torch.tensor_split(projection, (head_dim,), dim=-1)
        values = normal(blocks * kv_heads * block_size, head_dim + value_dim)
        key_cache, value_cache = _caches(values, kv_heads, head_dim, block_size, layout)
        free = blocks * block_size
        slots = torch.arange(3, 3 + tokens) if consecutive else torch.randperm(free, generator=generator)[:tokens]
        slots[list(skip)] = -1
        return Sample(label, (key, value, key_cache, value_cache, slots.to(device)), serving)

    yield sample("decode, 32 tokens", 32, 8, 128)
    yield sample("prefill, 200 tokens", 200, 4, 64, consecutive=True)
    yield sample("token-major cache", 33, 2, 80, layout="token-major")
    yield sample("padded and skipped tokens", 12, 4, 64, skip=(0, 7, 11), padding=4)
    yield sample("keys transposed, block size 32", 33, 2, 64, block_size=32, layout="keys transposed")
    yield sample("keys transposed, head size 80", 21, 2, 80, layout="keys transposed", skip=(5,), padding=2)
    yield sample("latent cache, 512 and 64 elements", 33, 1, 512, 64)
    yield sample("value narrower than key", 9, 2, 96, 64, serving=False)
    yield sample("block size 1", 9, 2, 64, blocks=32, block_size=1, layout="token-major", serving=False)
    yield sample("one token", 1, 1, 64, serving=False)
    yield sample("only skipped tokens", 2, 1, 64, skip=(0, 1), serving=False)
    yield sample("empty batch", 0, 2, 64, serving=False)


@operator(
    hints=("may_skip",),
    writes={"key_cache": STATE, "value_cache": STATE},
    modes=MODES,
    fake=_write_fake,
    samples=_write_samples,
    workload=_write_workload,
    work=_write_work,
)
def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    may_skip: bool | None = None,
) -> None:
    """Store keys and values of new tokens in a paged cache.

    Token ``t`` goes to block ``slot_mapping[t] // block_size`` at offset ``slot_mapping[t] % block_size``; a negative
    slot is skipped. Non-negative slots are distinct.

    Args:
        key: ``[tokens, kv_heads, head_dim]``, floating point, any strides. Rows beyond ``slot_mapping`` are padding.
        value: ``[tokens, kv_heads, value_dim]``, dtype of ``key``, any strides.
        key_cache: ``[blocks, block_size, kv_heads, head_dim]``, a view in any strides. The addressed slots are
            overwritten.
        value_cache: ``[blocks, block_size, kv_heads, value_dim]``, likewise.
        slot_mapping: ``[at most tokens]``, int64.
        may_skip: hint: ``False`` where the caller knows that no slot is negative.
    """
    raise NotImplementedError


def _fake(
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
) -> Tensor:
    return query.new_empty((*query.shape[:2], value_cache.shape[-1])) if out is None else out


def _workload(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    *args: object,
) -> Workload:
    return Workload(query.dtype, query.shape[0], "decode" if max_query_len == 1 else "prefill")


def _work(
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
    return Work(queries + keys * key_cache.shape[2] * dims * key_cache.element_size(), 2 * pairs * heads * dims)


def _samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    def sample(
        label: str,
        requests: Sequence[tuple[int, int]],
        heads: tuple[int, int],
        head_dim: int,
        value_dim: int | None = None,
        *,
        block_size: int = 16,
        layout: str = "head-major",
        padding: int | None = None,
        causal: bool = True,
        window: int | None = None,
        softcap: float = 0.0,
        alibi: bool = False,
        sinks: bool = False,
        serving: bool = True,
    ) -> Sample:
        """``requests`` are (new tokens, all tokens). With ``padding``, ``out`` is given and has so many rows more."""
        value_dim = value_dim or head_dim
        lengths = [length for _, length in requests]
        blocks = [-(-length // block_size) for length in lengths]
        # Block 0 belongs to nobody: hosts point the unused entries of the table there.
        pages = 1 + torch.randperm(sum(blocks), generator=generator, dtype=torch.int32)
        table = torch.zeros(len(requests), max(blocks, default=0) + 1, dtype=torch.int32)
        for row, part in (
            zip(table, torch.tensor_split(pages, torch.tensor(blocks).cumsum(0)[:-1]), strict=True) if requests else ()
        ):
            row[: len(part)] = part
        starts = torch.tensor([0, *(new for new, _ in requests)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        tokens = int(starts[-1]) + (padding or 0)
        values = normal((1 + sum(blocks)) * heads[1] * block_size, head_dim + value_dim)
        key_cache, value_cache = _caches(values, heads[1], head_dim, block_size, layout)
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads[0] + 1) / heads[0]) if alibi else None
        args = (
            normal(tokens, heads[0], head_dim),
            key_cache,
            value_cache,
            table.to(device),
            starts.to(device),
            torch.tensor(lengths, dtype=torch.int32).to(device),
            max((new for new, _ in requests), default=0),
            max(lengths, default=0),
            head_dim**-0.5,
            None if padding is None else normal(tokens, heads[0], value_dim),
            causal,
            window,
            softcap,
            None if slopes is None else slopes.to(device),
            normal(heads[0]) if sinks else None,
        )
        return Sample(label, args, serving)

    decode = [(1, length) for length in (1, 16, 17, 64, 129, 256, 333, 512)]
    mixed = [(1, 300), (1, 33), (70, 70), (17, 100), (1, 1)]
    yield sample("decode, 8 requests, GQA 4", decode, (32, 8), 128)
    yield sample("prefill, 2 requests, GQA 8", [(128, 128), (40, 40)], (16, 2), 64)
    yield sample("mixed batch, chunked prefill", mixed, (16, 4), 128)
    yield sample("head size 80, MHA, token-major cache", mixed[1:], (8, 8), 80, layout="token-major")
    yield sample("padded batch with out", [(1, 40), (5, 21), (0, 0)], (8, 2), 64, padding=3)
    yield sample("decode with out, block size 32", decode[:4], (8, 1), 128, block_size=32, padding=0)
    yield sample("sliding window 32", mixed, (8, 4), 64, window=32)
    yield sample("sliding window 24, softcap 30", mixed, (8, 4), 128, window=24, softcap=30.0)
    yield sample("sinks, sliding window 128", mixed[:3], (8, 1), 64, window=128, sinks=True)
    yield sample("alibi", mixed[1:], (8, 8), 64, alibi=True)
    yield sample("keys transposed, decode", decode, (16, 4), 128, block_size=32, layout="keys transposed", padding=0)
    yield sample("keys transposed, sliding window 24", mixed, (8, 4), 80, layout="keys transposed", window=24)
    apart = {"block_size": 128, "layout": "token-major", "padding": 2}
    yield sample("blocks of 128, decode", decode, (16, 4), 128, **apart)
    yield sample("blocks of 128, mixed batch", [*mixed, (0, 0)], (8, 2), 64, **apart)
    yield sample("blocks of 128, decode, sliding window 200", decode, (8, 4), 64, window=200, **apart)
    yield sample("blocks of 128, sliding window 48", mixed, (8, 8), 64, window=48, **apart)
    yield sample("blocks of 128, not causal", mixed[1:4], (4, 2), 64, causal=False, serving=False, **apart)
    yield sample("not causal", [(20, 20), (7, 7)], (4, 2), 64, causal=False, serving=False)
    yield sample("not causal, sliding window 5", [(20, 20)], (4, 2), 64, causal=False, window=5, serving=False)
    yield sample("value narrower than key", mixed[1:], (4, 2), 96, 64, serving=False)
    yield sample("softcap 2, alibi, sinks", mixed[1:4], (6, 3), 64, softcap=2.0, alibi=True, sinks=True, serving=False)
    yield sample("one token", [(1, 1)], (4, 1), 64, serving=False)
    yield sample("sliding window 1", [(3, 9)], (4, 1), 64, window=1, serving=False)
    yield sample("empty batch", [], (4, 1), 64, serving=False)


@operator(
    hints=("query_start_loc_host", "seq_lens_host"),
    writes={"out": Write(Access.OUTPUT)},
    modes=MODES,
    fake=_fake,
    samples=_samples,
    tolerances=TOLERANCES,
    workload=_workload,
    phases=True,
    work=_work,
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
    query_start_loc_host: Sequence[int] | None = None,
    seq_lens_host: Sequence[int] | None = None,
) -> Tensor:
    """Attention of new tokens over a paged cache, prefill and decode mixed (Kwon et al., arXiv 2309.06180).

    Query ``i`` of a request stands at ``p = seq_len - query_len + i``, and the cache already holds the new tokens. The
    score of the key at ``j`` is ``s = scale * (q . k)``, then ``softcap * tanh(s / softcap)``, then minus
    ``slope * |p - j|`` (Press et al., arXiv 2108.12409). Head ``h`` reads key-value head ``h // (heads / kv_heads)``.

    Args:
        query: ``[tokens, heads, head_dim]``, floating point.
        key_cache: ``[blocks, block_size, kv_heads, head_dim]``, a view in any strides.
        value_cache: ``[blocks, block_size, kv_heads, value_dim]``, likewise.
        block_table: ``[requests, max_blocks]``, int32: the blocks of a request in order. Entries that no visible key
            needs may hold anything.
        query_start_loc: ``[requests + 1]``, int32: first row of each request in ``query``, and the end of the last one.
        seq_lens: ``[requests]``, int32: keys of each request, the new tokens included.
        max_query_len: largest number of new tokens of a request, or more.
        max_seq_len: largest of ``seq_lens``, or more.
        scale: factor of the scores.
        out: ``[tokens, heads, value_dim]``, or ``None`` for a new tensor. Overwritten, but for rows that no request
            covers.
        causal: a query sees no key behind its own position.
        sliding_window: how many keys a query sees, its own position included, or ``None`` for all. Without ``causal``
            as many on the other side.
        softcap: bound of the scores; 0 for none.
        alibi_slopes: ``[heads]``, float32, or ``None``.
        sinks: ``[heads]``, floating point, or ``None``: one more score for each head that takes part in the softmax's
            denominator only (Xiao et al., arXiv 2309.17453).
        query_start_loc_host: hint: the numbers in ``query_start_loc``, for kernels that take them as integers.
        seq_lens_host: hint: the numbers in ``seq_lens``, likewise.

    Returns:
        ``[tokens, heads, value_dim]``, dtype of ``query``: ``out`` where given. Rows that no request covers are
        unspecified in a new tensor.
    """
    raise NotImplementedError


@operator(selection=True)
def attention_backend(use_mla: bool = False) -> str:
    """The attention class that a host should use.

    Args:
        use_mla: the model has multi-head latent attention.

    Returns:
        Its class path, such as ``package.module.ClassName``.
    """
    raise NotImplementedError
