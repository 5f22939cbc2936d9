"""Emulated sparse attention: the keys that each query lists, and attention over listed keys."""

from __future__ import annotations

import torch

from . import FLOAT, HALF, kernel, require, require_contiguous, require_dtype, require_same_dtype, waived
from .scores import attend

NEVER = 9223372036854775807
NOTHING = -1
COUNTS = (3072, 4096, 5120, 6144, 7168, 8192)
UNWRITTEN = 1 << 30
"""What stands in a list that nothing is written to."""


def _counts(name: str, lengths: torch.Tensor | None) -> list[int]:
    """Lengths as numbers; they come from the device."""
    require(lengths is not None, f"{name} must be given")
    assert lengths is not None
    require(lengths.dtype == torch.int32 and lengths.dim() == 1, f"{name} must be int32 [B], not {lengths.dtype}")
    numbers: list[int] = lengths.tolist()
    require(all(number >= 0 for number in numbers), f"{name} must not be negative")
    return numbers


def _ranges(name: str, lengths: torch.Tensor | None, total: int) -> list[tuple[int, int]]:
    """The ranges that sums of lengths name."""
    ends = _counts(name, lengths)
    starts = [0, *ends[:-1]]
    require(
        all(a <= b for a, b in zip(starts, ends, strict=True)), f"{name} must be sums, each at least the one before"
    )
    require(not ends or ends[-1] <= total, f"{name} ends at {ends[-1] if ends else 0}, behind {total} tokens")
    return list(zip(starts, ends, strict=True))


def _paged(cache: torch.Tensor, table: torch.Tensor | None, sequence: int, length: int) -> torch.Tensor:
    """The first keys of a sequence, [length, D], of a cache [blocks, block_size, 1, D]."""
    require(table is not None, "block_table must be given with PA_BSND")
    assert table is not None
    require(table.dtype == torch.int32 and table.dim() == 2, "block_table must be int32 with two dimensions")
    size = cache.shape[1]
    require(size % 16 == 0 and size <= 1024, f"block_size={size}; a multiple of 16 up to 1024 is wanted")
    count = -(-length // size)
    require(count <= table.shape[1], f"{length} keys are {count} blocks; block_table has {table.shape[1]} columns")
    blocks = table[sequence, :count].long()
    require(bool(((blocks >= 0) & (blocks < len(cache))).all()), f"block_table names block {blocks.tolist()}")
    return cache[blocks].flatten(0, 1)[:length, 0]


def _same(name: str, given: str, wanted: tuple[str, ...]) -> None:
    require(given in wanted, f"{name}={given!r} is not emulated; {', '.join(wanted)} are")


@kernel("npu_lightning_indexer")
def lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = NEVER,
    next_tokens: int = NEVER,
    return_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of the keys with the largest sums of weights * relu(Q K), [T, 1, sparse_count].

    Source: op-plugin's page and the Meta kernel. TND queries over pages (PA_BSND) are emulated.
    Refused: dtypes beside float16 and bfloat16, but for weights in float32; D beside 128; more than 64 heads; other
    counts than 1 to 2048 and the six above; block sizes that are no multiple of 16 up to 1024; values with pages.
    Assumed: float32 inside; the largest first, of equal ones the lower position; -1 behind the last one of a query with
    fewer keys; rows that no sequence has are not written, and there may be such.
    """
    _same("layout_query", layout_query, ("TND",))
    _same("layout_key", layout_key, ("PA_BSND",))
    require_dtype("query", query, HALF)
    require_dtype("weights", weights, FLOAT)
    require_same_dtype(query=query, key=key)
    require(weights.dtype in (torch.float32, query.dtype), f"weights are {weights.dtype}, not float32 or as the query")
    require_contiguous(query=query, key=key, weights=weights)
    require(query.dim() == 3 and weights.shape == query.shape[:2], "query is [T, N, D], and weights [T, N]")
    require(key.dim() == 4 and key.shape[2] == 1, "key is [blocks, block_size, 1, D]")
    heads, size = query.shape[1:]
    require(size == key.shape[3], f"query has D {size}, key {key.shape[3]}")
    require(size == 128 or waived("head_size"), f"D is {size}, not 128")
    require(heads <= 64, f"{heads} heads, above 64")
    require(1 <= sparse_count <= 2048 or sparse_count in COUNTS, f"sparse_count={sparse_count}")
    require(sparse_mode in (0, 3), f"sparse_mode={sparse_mode}, not 0 or 3")
    require(pre_tokens == next_tokens == NEVER, "pre_tokens and next_tokens have their defaults alone")
    require(not return_value, "return_value is not for PA_BSND")
    ranges = _ranges("actual_seq_lengths_query", actual_seq_lengths_query, len(query))
    lengths = _counts("actual_seq_lengths_key", actual_seq_lengths_key)
    require(len(ranges) == len(lengths), f"{len(ranges)} sequences of queries, {len(lengths)} of keys")
    made = torch.full((len(query), 1, sparse_count), UNWRITTEN, dtype=torch.int32)
    for number, ((start, end), length) in enumerate(zip(ranges, lengths, strict=True)):
        keys = _paged(key, block_table, number, length).float()
        products = torch.einsum("qhd,kd->qhk", query[start:end].float(), keys).relu()
        scores = (products * weights[start:end].float()[..., None]).sum(1)
        for row in range(end - start):
            seen = length - (end - start) + row + 1 if sparse_mode == 3 else length
            best = scores[row, : max(0, seen)].sort(descending=True, stable=True).indices[:sparse_count]
            made[start + row, 0] = NOTHING
            made[start + row, 0, : len(best)] = best.int()
    return made, query.new_empty(0)


@kernel("npu_sparse_flash_attention")
def sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = NEVER,
    next_tokens: int = NEVER,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latent attention of each query over the keys that its list names, [T, N, 512].

    Source: op-plugin's page and the Meta kernel. TND queries over keys in TND or in pages (PA_BSND), with lists of
    single tokens, are emulated. Refused: dtypes beside float16 and bfloat16; tensors that are not contiguous; D beside
    512 and 64; heads that are no power of two up to 128; a value that is not the key; attention_mode beside 2; a valid
    position behind an invalid one; a position outside of its sequence.
    Assumed: float32 inside; a negative position is invalid; a query that lists nothing is not written (NaN), nor are
    rows that no sequence has, and there may be such.
    """
    _same("layout_query", layout_query, ("TND",))
    _same("layout_kv", layout_kv, ("TND", "PA_BSND"))
    require(attention_mode == 2, f"attention_mode={attention_mode}, not 2")
    require(sparse_block_size == 1, f"sparse_block_size={sparse_block_size} is not emulated")
    require(sparse_mode in (0, 3), f"sparse_mode={sparse_mode}, not 0 or 3")
    require(pre_tokens == next_tokens == NEVER, "pre_tokens and next_tokens have their defaults alone")
    require(not return_softmax_lse and sinks is None, "softmax_max, softmax_sum and sinks are not emulated")
    require(value is not None and query_rope is not None and key_rope is not None, "value and both ropes must be given")
    assert value is not None
    assert query_rope is not None
    assert key_rope is not None
    require_dtype("query", query, HALF)
    require_same_dtype(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    require_contiguous(query=query, key=key, value=value, sparse_indices=sparse_indices, query_rope=query_rope)
    require_contiguous(key_rope=key_rope)
    sizes = (query.shape[-1], query_rope.shape[-1])
    require(sizes == (512, 64) or waived("head_size"), f"D is {sizes[0]} and {sizes[1]}, not 512 and 64")
    require((key.shape[-1], key_rope.shape[-1]) == sizes, "key and key_rope must have query's sizes")
    require(torch.equal(key.view(torch.uint8), value.view(torch.uint8)), "value must be the key")
    heads = query.shape[1]
    require(heads.bit_count() == 1 and heads <= 128, f"{heads} heads, not a power of two up to 128")
    require(sparse_indices.dtype == torch.int32, f"sparse_indices is {sparse_indices.dtype}, not int32")
    require(sparse_indices.shape[:2] == (len(query), 1), "sparse_indices is [T, 1, listed]")
    ranges = _ranges("actual_seq_lengths_query", actual_seq_lengths_query, len(query))
    paged = layout_kv == "PA_BSND"
    if paged:
        lengths = _counts("actual_seq_lengths_kv", actual_seq_lengths_kv)
        keys = [(0, length) for length in lengths]
    else:
        keys = _ranges("actual_seq_lengths_kv", actual_seq_lengths_kv, len(key))
    require(len(ranges) == len(keys), f"{len(ranges)} sequences of queries, {len(keys)} of keys")
    made = torch.full_like(query, torch.nan)
    for number, ((start, end), (first, last)) in enumerate(zip(ranges, keys, strict=True)):
        parts = [_paged(one, block_table, number, last) if paged else one[first:last, 0] for one in (key, key_rope)]
        latents, whole = parts[0], torch.cat(parts, -1)
        for row in range(start, end):
            listed = sparse_indices[row, 0]
            count = int((listed >= 0).sum())
            require(bool((listed[:count] >= 0).all()), "valid positions must stand before the invalid ones")
            listed = listed[:count].long()
            require(bool((listed < last - first).all()), f"a position is outside of the {last - first} keys")
            if sparse_mode == 3:
                listed = listed[listed <= last - first - (end - row)]
            if len(listed):
                rows = torch.cat((query[row], query_rope[row]), -1)[None]
                found = attend(rows, whole[listed][:, None], latents[listed][:, None], scale_value, None)
                made[row] = found.output[0].to(made.dtype)
    nothing = torch.empty(0, dtype=torch.float32)
    return made, nothing, nothing.clone()
