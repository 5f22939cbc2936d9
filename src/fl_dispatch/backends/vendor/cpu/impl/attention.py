"""Attention over a paged cache.

The kernels store a block as ``[kv_heads, head_dim, block_size]`` keys and ``[kv_heads, block_size, head_dim]`` values:
keys are transposed, values are not. Views in the declared order differ only in strides, so any other implementation can
read and write the same cache. A host with a cache in this layout states it as :data:`KV_LAYOUT`.

The attention kernel reads all values of a sequence's last block, with weight zero after the sequence's end. If another
request left a NaN or an infinity there, the result is NaN, and the call is repeated without such leftovers. Copies for
the matrix unit (:mod:`.tiles`) have none.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fl_dispatch.types import Traits

from .. import library
from . import schedules, tiles
from .limits import problem, rounds
from .schedules import instructions

KV_LAYOUT = "HDN/HND"
"""Order of a block's axes in memory, keys and values: heads, slots (N) and dimensions."""
REQUIRES = {"kv_layout": KV_LAYOUT}
TRAITS = Traits(kv_block=32)  # smaller blocks run 16 keys at a time
HEAD_DIMS = frozenset({32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""Head sizes that the kernels are compiled for."""
LEAST_BLOCK = 16


class _Views(NamedTuple):
    """A pair of caches as the kernels take them; ``why_not`` says why they do not."""

    value_cache: Tensor
    why_not: str
    keys: Tensor
    values: Tensor
    instructions: str


ATTRIBUTE = "fl_cpu_views"
"""Attribute of a key cache with its ``_Views``, because a host passes the same tensors in every step."""


def _views(key_cache: Tensor, value_cache: Tensor) -> _Views:
    found: _Views | None = getattr(key_cache, ATTRIBUTE, None)
    if found is None or found.value_cache is not value_cache:
        _, block_size, _, head_dim = key_cache.shape
        strides = key_cache.stride(), value_cache.stride()
        why_not = _layout_refusal(block_size, head_dim, value_cache.shape[3], *strides)
        keys = key_cache if why_not else _as_values(key_cache)
        found = _Views(value_cache, why_not, keys, value_cache.transpose(1, 2), instructions(block_size, head_dim))
        setattr(key_cache, ATTRIBUTE, found)
    return found


def _layout_refusal(
    block_size: int, head_dim: int, value_dim: int, keys: tuple[int, ...], values: tuple[int, ...]
) -> str:
    """Return why no kernel takes blocks of these sizes and strides, or an empty string."""
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim} is not one of {', '.join(map(str, sorted(HEAD_DIMS)))}"
    if value_dim != head_dim:
        return f"value size {value_dim} is not the head size {head_dim}"
    if block_size % LEAST_BLOCK:
        return f"block size {block_size} is not a multiple of {LEAST_BLOCK}"
    # The kernel takes one block stride and one head stride for both caches.
    if keys != (values[0], 1, values[2], block_size) or values != (keys[0], head_dim, keys[2], 1):
        return f"the cache layout is not {KV_LAYOUT} (strides of keys {keys}, of values {values})"
    return ""


def supports_kv_cache_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool | str:
    """Check for one dtype, the layout of the kernels, and contiguous heads."""
    if why := problem("key", key, contiguous=False):
        return why
    for name, tensor in (("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.dtype is not key.dtype:
            return f"{name} is {tensor.dtype}, not {key.dtype}"
    if key.stride(2) != 1 or value.stride(2) != 1:
        return "the dimensions of a head do not lie side by side"
    return _views(key_cache, value_cache).why_not or True


def kv_cache_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :data:`fl_dispatch.ops.attention.kv_cache_write`."""
    tokens, views = slot_mapping.shape[0], _views(key_cache, value_cache)
    if key.shape[0] != tokens:
        key, value = key[:tokens], value[:tokens]
    torch.ops._C.cpu_attn_reshape_and_cache(
        key,
        value,
        views.keys,
        views.values,
        slot_mapping.contiguous(),
        views.instructions,
        1.0,
        1.0,
        "auto",
    )


def supports_paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor | None = None
) -> bool | str:
    """Check for one dtype and the layout of the kernels, which cover windows, soft caps, ALiBi and sinks."""
    if why := problem("query", query, contiguous=False):
        return why
    if not rounds(query.dtype):
        return "the build for this processor truncates results to bfloat16"
    if key_cache.dtype is not query.dtype or value_cache.dtype is not query.dtype:
        return f"the caches are {key_cache.dtype} and {value_cache.dtype}, not {query.dtype}"
    if query.stride(2) != 1 or (out is not None and not out.is_contiguous()):
        return "the dimensions of a head do not lie side by side, or out is not contiguous"
    return _views(key_cache, value_cache).why_not or True


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
    query_start_loc_host: list[int] | None = None,
    seq_lens_host: list[int] | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.attention.paged_attention`."""
    if out is None:
        out = query.new_empty(query.shape)
    if sinks is not None and sinks.dtype is torch.float16:
        sinks = sinks.float()
    _, _, keys, values, variant = _views(key_cache, value_cache)
    window = -1 if sliding_window is None else sliding_window
    if tiles.may_pay(query, max_query_len):
        starts, lengths = query_start_loc_host or query_start_loc.tolist(), seq_lens_host or seq_lens.tolist()
        if tiles.pays(values.shape[1], values.shape[3], starts, lengths, window):
            keys, values, block_table = tiles.copies(key_cache, value_cache, block_table, lengths)
            variant = tiles.TILES
    schedule = schedules.find(
        query, values, query_start_loc, seq_lens, causal, window, query_start_loc_host, seq_lens_host, variant
    )
    rest = (query_start_loc, seq_lens, scale, causal, alibi_slopes, window)
    _attend(query, keys, values, block_table, out, schedule, softcap, sinks, *rest)
    # One pass over the results: if one of them is not finite, neither is the sum.
    if variant != tiles.TILES and not math.isfinite(out.sum()) and out[: int(query_start_loc[-1])].isnan().any():
        keys, values, block_table = _without_leftovers(keys, values, block_table, seq_lens, max_seq_len)
        _attend(query, keys, values, block_table, out, schedule, softcap, sinks, *rest)
    return out


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    out: Tensor,
    schedule: Tensor,
    softcap: float,
    sinks: Tensor | None,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: Tensor | None,
    window: int,
) -> None:
    """Call the kernel on caches in its shape."""
    torch.ops._C.cpu_attention_with_kv_cache(
        query,
        keys,
        values,
        out,
        query_start_loc,
        seq_lens,
        scale,
        causal,
        alibi_slopes,
        window,
        block_table,
        softcap,
        schedule,
        sinks,
        None,
        1.0,
        1.0,
        "auto",
    )


def _without_leftovers(
    keys: Tensor, values: Tensor, block_table: Tensor, seq_lens: Tensor, max_seq_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy the requests' blocks, with zeros for values after their ends; return keys, values and the new table."""
    block_size, requests = values.shape[2], seq_lens.shape[0]
    columns = -(-max_seq_len // block_size)
    # table entries without keys may hold anything
    blocks = block_table[:requests, :columns].clamp(0, values.shape[0] - 1).flatten()
    behind = torch.arange(columns * block_size) >= seq_lens[:, None]
    cleaned = values[blocks].masked_fill_(behind.view(-1, 1, block_size, 1), 0.0)
    table = torch.arange(len(blocks), dtype=torch.int32).view(requests, columns)
    return keys[blocks].contiguous(), cleaned.contiguous(), table


def _as_values(key_cache: Tensor) -> Tensor:
    """Return the keys' memory in the shape of values, as the kernels expect it."""
    blocks, block_size, kv_heads, head_dim = key_cache.shape
    block, _, head, _ = key_cache.stride()
    return key_cache.as_strided((blocks, kv_heads, block_size, head_dim), (block, head, head_dim, 1))


def find_layout_problem() -> str:
    """Check the loaded kernels for the layout that this module states: write one token and read it back.

    Returns:
        The problem, or an empty string.
    """
    block_size, kv_heads, head_dim = 32, 2, 32
    page = torch.zeros(2, kv_heads, 2 * head_dim * block_size)
    keys, values = page.chunk(2, dim=-1)
    key_cache = keys.view(2, kv_heads, head_dim, block_size).permute(0, 3, 1, 2)
    value_cache = values.view(2, kv_heads, block_size, head_dim).transpose(1, 2)
    token = torch.arange(1.0, 1 + 2 * kv_heads * head_dim).view(2, 1, kv_heads, head_dim)
    kv_cache_write(token[0], token[1], key_cache, value_cache, torch.tensor([block_size + 5]))
    if torch.equal(key_cache[1, 5], token[0, 0]) and torch.equal(value_cache[1, 5], token[1, 0]):
        return ""
    return f"the kernels of this vLLM do not keep a block as {KV_LAYOUT}"


_layout_problem = functools.cache(find_layout_problem)


def why_unavailable() -> str:
    """Return why the kernels are not loaded or have an unknown layout, or an empty string."""
    return library.why_unavailable() or _layout_problem()
