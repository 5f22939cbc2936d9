"""Attention over a paged cache.

One kernel serves two routes. On the *long* route, for requests such as prompts, a program takes ``BLOCK_M`` queries of
one head. It skips the mask for keys that all queries see and applies it at the edges. On the *short* route, for decode,
a program takes the few queries of all heads that share a key-value head, and several programs split a request's keys;
a second kernel combines their partial results. A mixed batch uses both routes, each for its own requests.

On Hopper :mod:`..hopper` has a separate kernel for the cases of the long route that it covers.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_dispatch.devices import device_of
from fl_dispatch.devices.launcher import INTERPRETED, Launcher
from fl_dispatch.errors import NotSupported

from .. import hopper
from ..launch import power_of_two
from .cache import scale_strides
from .paged_kernels import _attention, _combine

LONG_TILE = (128, 64, 8, 3)
"""Queries, keys, warps, stages of the long route."""
LONG_TILE_LARGE = (64, 32, 4, 2)
"""``LONG_TILE`` for float32 and for heads over 128."""
SHORT_TILE = (64, 2, 3)
"""Keys, warps, stages of the short route."""
SHORT_TILE_LARGE = (32, 4, 2)
"""``SHORT_TILE`` for float32 and for heads over 128."""
SHORT_ROWS = 16
"""Rows (queries times heads of a group) of a program on the short route in a batch with long requests."""
MOST_SHORT_ROWS = 64
"""Most rows with which a whole batch takes the short route."""
SHORT_PER_PROCESSOR = 2
"""Programs of the short route on one multiprocessor."""
INTERPRETED_PROCESSORS = 4
FULL = 0.9
"""Least fraction of the waves of programs that must be filled."""
LEAST_KEYS = 128
"""Fewest keys of a program when a request's keys are split."""
LEAST_KEYS_MIXED = 2048
"""``LEAST_KEYS`` in a batch with long requests; with fewer keys all requests take the long route."""
MOST_SPLITS = 64
LONGEST = 1 << 30
LIMIT = 1 << 31


_launch = Launcher(_attention)
_launch_combine = Launcher(_combine)


@functools.cache
def _slots(device: torch.device) -> int:
    """Return the number of programs of the short route that the device runs at a time."""
    processors = INTERPRETED_PROCESSORS if INTERPRETED else device_of(device.type).compute_units(device.index or 0)
    return SHORT_PER_PROCESSOR * processors


@functools.cache
def _splits(slots: int, programs: int, most: int) -> int:
    """Return how many programs share a request's keys: the fewest that nearly fill their waves."""
    fill = [0.0] + [programs * splits / slots / -(-programs * splits // slots) for splits in range(1, most + 1)]
    return next((splits for splits in range(1, most + 1) if fill[splits] >= FULL), fill.index(max(fill)))


def combining_warps(splits: int, block_dv: int) -> int:
    """Return the warps of the combine kernel: few, because it is memory-bound."""
    return max(1, min(4, splits * block_dv // 4096))


class Call(NamedTuple):
    """Arguments of every launch, and the properties that choose its route.

    Args:
        tensors: the kernel's tensors except the partial results.
        packed: rows for each query when heads share a program.
        large: whether heads or elements are so large that tiles must be small.
    """

    out: Tensor
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]
    tail: tuple[Any, ...]
    packed: int
    large: bool


def prepare(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor | None,
    causal: bool,
    sliding_window: int | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    key_scale: float | None,
    value_scale: float | None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Call:
    """Check a call's arguments and order them as the kernel takes them.

    Raises:
        NotSupported: float64, or an ``out`` with strided elements.
    """
    tokens, heads, dim = query.shape
    blocks, block_size, kv_heads, dim_v = value_cache.shape
    if query.dtype is torch.float64 or scale <= 0:
        raise NotSupported("float64" if scale > 0 else f"the scale {scale}")
    if out is None:
        out = query.new_empty((tokens, heads, dim_v))
    elif out.stride(2) != 1:
        raise NotSupported("the elements of a head of 'out' do not lie side by side")
    key_strides, value_strides = key_cache.stride(), value_cache.stride()
    narrow = blocks * max(key_strides[0], value_strides[0]) < LIMIT
    group = heads // kv_heads
    packed = power_of_two(group)
    block_d, block_dv = max(16, power_of_two(dim)), max(16, power_of_two(dim_v))
    wide = query.dtype is torch.float32
    large = wide or block_d > 128
    tail = (block_d, block_dv, "ieee" if wide else "tf32", narrow)  # half types ignore tf32
    window = sliding_window or 0
    common = (heads, group, dim, dim_v, block_size, causal, window, softcap > 0, alibi_slopes is not None)
    numbers = (
        *query.stride(), *key_strides, *value_strides, out.stride(0), out.stride(1), block_table.stride(0),
        *scale_strides(key_scales), *scale_strides(value_scales),
        scale if key_scale is None else scale * key_scale, softcap, 1.0 if value_scale is None else value_scale,
        *common, sinks is not None, value_scale is not None, value_scales is not None,
    )  # fmt: skip
    slopes, sink = out if alibi_slopes is None else alibi_slopes, out if sinks is None else sinks
    scales = (out if each is None else each for each in (key_scales, value_scales))
    tensors = (query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out, slopes, sink, *scales)
    return Call(out, tensors, numbers, tail, packed, large)


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
) -> Tensor:
    """See :data:`fl_dispatch.ops.attention.paged_attention`. Declines float64, and an ``out`` with strided elements."""
    call = prepare(
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens, scale, out, causal, sliding_window,
        softcap, alibi_slopes, sinks, key_scale, value_scale, key_scales, value_scales,
    )  # fmt: skip
    out, tensors, numbers, tail, packed, large = call
    heads, dim_v, kv_heads, requests = query.shape[1], out.shape[2], key_cache.shape[2], seq_lens.shape[0]
    window, block_dv, sink, narrow = sliding_window or 0, tail[1], out if sinks is None else sinks, tail[-1]
    if not requests or not query.shape[0] or not max_query_len:
        return out
    most_new = max(SHORT_ROWS // packed, power_of_two(max_query_len))
    all_short = most_new * packed <= MOST_SHORT_ROWS
    mixed = not all_short and requests > 1 and packed <= SHORT_ROWS and max_seq_len > LEAST_KEYS_MIXED
    if not all_short:
        most_new = SHORT_ROWS // packed
        least_new = most_new + 1 if mixed else 0
        special = window or softcap > 0 or alibi_slopes is not None or sinks is not None
        if not special and hopper.fits(query, key_cache, value_cache):
            hopper.attend_paged(
                query, key_cache, value_cache, block_table, query_start_loc, seq_lens, scale, out, causal=causal,
                least_new=least_new, narrow=narrow,
            )  # fmt: skip
        else:
            block_m, block_n, warps, stages = LONG_TILE_LARGE if large else LONG_TILE
            route = (least_new, LONGEST, False, 1, False, block_m, block_n)
            grid = (heads, requests, -(-max_query_len // block_m))
            _launch(grid, (*tensors, out, out), (*numbers, *route, *tail), sizes=(1,), warps=warps, stages=stages)
    if all_short or mixed:
        block_n, warps, stages = SHORT_TILE_LARGE if large else SHORT_TILE
        most = min(MOST_SPLITS, -(-max_seq_len // (LEAST_KEYS if all_short else LEAST_KEYS_MIXED)))
        splits = _splits(_slots(query.device), requests * kv_heads, most)
        rows = requests * most_new * heads * splits if splits > 1 else 0
        partial = torch.empty(rows * (dim_v + 2), dtype=torch.float32, device=query.device) if rows else out
        statistics = partial[rows * dim_v :] if rows else out
        route = (0, most_new, True, packed, splits > 1, most_new * packed, block_n)
        grid = (kv_heads, requests, splits)
        _launch(
            grid,
            (*tensors, partial, statistics),
            (*numbers, *route, *tail),
            sizes=(splits,),
            warps=warps,
            stages=stages,
        )
        if splits > 1:
            _launch_combine(
                (heads, requests, min(most_new, max_query_len)),
                (query_start_loc, seq_lens, out, sink, partial, statistics),
                (
                    out.stride(0), out.stride(1), heads, dim_v, causal, window, sinks is not None, power_of_two(most),
                    block_n, block_dv,
                ),
                sizes=(splits, most_new),
                warps=combining_warps(power_of_two(most), block_dv),
            )  # fmt: skip
    return out
