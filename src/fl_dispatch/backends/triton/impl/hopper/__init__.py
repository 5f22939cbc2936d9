"""Attention kernels in Gluon, only for Hopper: checks of their tensors, and their launch.

The plain kernels compute a tile's softmax and its products one after the other. Here warps specialize: producers load,
consumers multiply, and the tensor cores work during a softmax. :mod:`.prefill` serves many queries of a request,
:mod:`.latent_decode` decode for latent attention, and :mod:`.scores` scores tokens for sparse attention; all use
:mod:`.pipeline`, and ``docs/evidence/hopper.md`` shows which warps wait for which. The kernels need instructions of one
chip and an experimental part of Triton, so they run only on compute capability 9, with a tested version, and for the
shapes and options that they cover. Everything else runs the plain kernel; ``VLLM_FL_CHIP_FEATURES=0`` forces the plain
kernel.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import triton
from torch import Tensor

from fl_dispatch.devices import CUDA, device_of
from fl_dispatch.devices.launcher import INTERPRETED, Launcher
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from ..launch import processors

logger = get_logger(__name__)

TESTED = ((3, 6), (3, 8))
"""Versions of Triton with which the kernels were tested and measured on a GPU."""
TESTED_LISTS = ((3, 8),)
"""Tested versions for listed latent rows."""
TESTED_IN_BULK = ((3, 8),)
"""Tested versions for contiguous keys; the tensor memory accelerator copies their tiles."""
TESTED_SCORES = ((3, 8),)
"""Versions that the kernel for index scores was tested with, on an H200."""
PAGED, IN_A_ROW = "prefill.kernel:attention", "prefill.bulk:attention_bulk"
LATENT, LISTED = "latent_decode.kernel:latent_attention", "latent_decode.listed:listed_attention"
SCORES = "scores:index_scores"
CAPABILITY = 9
DIMENSIONS = {64: (64, 0), 128: (128, 0), 192: (128, 64)}
"""Size of a head's key → the largest power of two in it, and the rest."""
VALUE_DIMENSIONS = (64, 128)
LATENT_RANK = 512
"""Rank of the latent rows of DeepSeek-V2 and V3."""
LATENT_ROPE = 64
"""Rotary elements of the latent rows of DeepSeek-V2 and V3."""
LATENT_ROWS = 64
"""Rows of a tile of the kernel for latent attention."""
LATENT_KEYS = 64
"""Keys of a tile of the kernel for latent attention."""
SCORE_ROWS = 64
"""Tokens of a tile of the kernel for index scores."""
INDEX_HEADS = (32, 64)
"""Heads of index queries."""
INDEX_DIM = 128
"""Elements of an index key."""
ALIGNMENT = 16
"""Divisor of strides and pointers; the compiler must know it, because copies move 16 bytes."""
WARPS = 4
"""Warps of each consumer."""
ENDLESS = 1 << 30
"""Bound of a descriptor's dimension that ends at a request's last row."""
ENDS = 0x7FFF0000
"""Bound of the dimensions that compensate for ``ENDLESS``."""
FAR = 1 << 34
"""Bound of a tensor's row stride; the outermost stride of a descriptor is ``FAR`` minus the row stride."""
MOST_PROGRAMS = 65_535
"""Most programs along a grid's second axis."""
LIMIT = 1 << 31
"""Bound of offsets and of a row's extent in 32 bits."""


def why_unavailable(device: torch.device) -> str:
    """Return why the kernels cannot run on a device, or an empty string; logged once."""
    return _why_unavailable(device, get_settings().chip_features)


@functools.cache
def _why_unavailable(device: torch.device, chip_features: bool) -> str:
    spec = device_of(device.type)
    if INTERPRETED or spec.vendor != CUDA.vendor:
        return "not an NVIDIA GPU"
    if (spec.capability(device.index or 0) or (0, 0))[0] != CAPABILITY:
        return f"the device is not of compute capability {CAPABILITY}"
    reason = ""
    if not chip_features:
        reason = f"chip_features is off ({get_settings().origin('chip_features')})"
    elif _version() not in TESTED:
        reason = f"it is not tested with Triton {triton.__version__}"
    else:
        try:
            _launcher(PAGED)
            _launcher(LATENT)
        except ImportError as error:
            reason = f"Triton's Gluon lacks something: {error}"
    if reason:
        logger.info("Attention on %s takes the plain Triton kernels, not those for Hopper: %s", device, reason)
    return reason


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in triton.__version__.split(".")[:2])


@functools.cache
def _copies_in_bulk() -> bool:
    if _version() in TESTED_IN_BULK:
        return True
    why = f"copies in bulk are not tested with Triton {triton.__version__}"
    logger.info("Attention over keys in a row takes the plain Triton kernel, not that for Hopper: %s", why)
    return False


@functools.cache
def _launcher(kernel: str) -> Launcher:
    """Import a kernel, and Gluon with it, because not every Triton has Gluon."""
    module, _, name = kernel.partition(":")
    return Launcher(getattr(importlib.import_module(f"{__package__}.{module}"), name))


@functools.cache
def _descriptor_parts() -> tuple[Any, Any]:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor, NVMMASharedLayout(128, 16, 4)


def _descriptor(tensor: Tensor) -> object:
    """Make a descriptor of a tensor ``[tokens, heads, dim]`` for bulk copies; :mod:`.prefill.bulk` explains it.

    Skips Triton's checks, because :func:`fits_in_a_row` makes them.
    """
    kind, layout = _descriptor_parts()
    token = tensor.stride(0)
    made = object.__new__(kind)
    made.base = tensor
    made.shape = [ENDS, ENDS, ENDLESS, _extent(tensor)]
    made.strides = [FAR - token, token, token, 1]
    made.block_shape, made.layout, made.padding, made.round_f32_to_tf32 = [1, 1, 128, 64], layout, "zero", False
    return made


def _extent(tensor: Tensor) -> int:
    """Elements from the start of a token's first head to the end of its last head."""
    return (tensor.shape[1] - 1) * tensor.stride(1) + tensor.shape[2]


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether a prefill kernel takes these tensors; their last dimension is that of a head."""
    if why_unavailable(query.device):
        return False
    if query.shape[-1] not in DIMENSIONS or value.shape[-1] not in VALUE_DIMENSIONS:
        return False
    return _aligned_halves(query, key, value)


def fits_in_a_row(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> bool:
    """Return whether the prefill kernel for contiguous keys takes these tensors, ``[tokens, heads, dim]``.

    Compiled kernels are cached by the dtype of ``out``, not of the descriptors, so all tensors must share it.
    """
    if out.dtype is not query.dtype or not fits(query, key, value) or not _copies_in_bulk():
        return False
    return all(
        0 < tensor.shape[0] < ENDLESS and 0 < tensor.stride(0) < FAR and 0 < _extent(tensor) < LIMIT
        for tensor in (query, key, value)
    )


def fits_latent(query: Tensor, query_rope: Tensor, kv_cache: Tensor) -> bool:
    """Return whether the decode kernel for latent attention takes these tensors."""
    if why_unavailable(query.device):
        return False
    if (query.shape[-1], query_rope.shape[-1]) != (LATENT_RANK, LATENT_ROPE):
        return False
    return _aligned_halves(query, query_rope, kv_cache)


def fits_listed(query: Tensor, query_rope: Tensor, kv_cache: Tensor) -> bool:
    """Return whether the kernel for listed latent rows takes these tensors."""
    return len(query) <= MOST_PROGRAMS and _version() in TESTED_LISTS and fits_latent(query, query_rope, kv_cache)


def fits_scores(query: Tensor, key_cache: Tensor) -> bool:
    """Return whether the kernel for index scores takes these queries and keys in fp8."""
    if why_unavailable(query.device) or _version() not in TESTED_SCORES:
        return False
    if query.shape[1] not in INDEX_HEADS or query.shape[2] != INDEX_DIM:
        return False
    return query.dtype is key_cache.dtype is torch.float8_e4m3fn and _aligned(query, key_cache)


def _aligned_halves(*tensors: Tensor) -> bool:
    """Return whether all tensors share one half type and have rows that the kernels can copy."""
    dtype = tensors[0].dtype
    if dtype not in (torch.float16, torch.bfloat16) or any(tensor.dtype != dtype for tensor in tensors):
        return False
    return _aligned(*tensors)


def _aligned(*tensors: Tensor) -> bool:
    """Return whether all tensors have rows that the kernels can copy."""
    for tensor in tensors:
        *strides, last = tensor.stride()
        if last != 1 or tensor.data_ptr() % ALIGNMENT or any(stride % ALIGNMENT for stride in strides):
            return False
    return True


def attend_paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    *,
    causal: bool,
    least_new: int,
    narrow: bool,
) -> None:
    """Compute attention for requests with at least ``least_new`` new tokens, if :func:`fits`; no window, cap or bias.

    Args:
        narrow: whether the blocks of both caches lie within 2**31 elements.
        others: as in :data:`fl_dispatch.ops.attention.paged_attention`.
    """
    heads = query.shape[1]
    slots, kv_heads = key_cache.shape[1:3]
    for _, slot, head, _ in (key_cache.stride(), value_cache.stride()):
        narrow = narrow and max(slots * slot, kv_heads * head) < LIMIT
    _launcher(PAGED)(
        (processors(query.device), 1, 1),
        (query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out),
        (
            query.stride(0), query.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3], out.stride(0),
            out.stride(1), block_table.stride(0), scale, heads // kv_heads, slots, causal,
            *DIMENSIONS[query.shape[2]], value_cache.shape[3], narrow,
        ),
        sizes=(seq_lens.shape[0], heads, least_new),
        warps=WARPS,
    )  # fmt: skip


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
) -> None:
    """Compute attention over contiguous keys with as many heads as the queries, if :func:`fits_in_a_row`.

    See :data:`fl_dispatch.ops.mla.mla_prefill`.
    """
    _launcher(IN_A_ROW)(
        (processors(query.device), 1, 1),
        (query_start_loc, key_start_loc, out, lse),
        (
            query.stride(1), key.stride(1), value.stride(1), out.stride(0), out.stride(1), scale, causal,
            *DIMENSIONS[query.shape[2]], value.shape[2],
        ),
        sizes=(*map(_descriptor, (query, key, value)), query_start_loc.shape[0] - 1, query.shape[1], lse.stride(0)),
        warps=WARPS,
    )  # fmt: skip


def latent_slots(device: torch.device) -> int:
    """Return the number of programs of the kernel for latent attention that the device runs at a time."""
    return processors(device)


def decode_latent(
    tensors: tuple[Tensor, ...],
    numbers: tuple[object, ...],
    *,
    tiles: int,
    requests: int,
    splits: int,
    block_size: int,
    causal: bool,
    most_new: int,
) -> None:
    """Compute decode for latent attention, if :func:`fits_latent`.

    Args:
        tensors, numbers: query, its rotary part, cache, block table, query starts, lengths, out, partial results, their
            statistics; then strides, scale and heads, as the plain kernel takes them.
        tiles: tiles of ``LATENT_ROWS`` rows.
        splits: programs that share a request's keys, in tiles of ``LATENT_KEYS``; several write partial results.
        block_size, causal, most_new: slots of a block of the cache; the plain kernel's options for the queries.
    """
    _launcher(LATENT)(
        (tiles * requests * splits, 1, 1), tensors, (*numbers, block_size, causal, most_new, splits > 1),
        sizes=(tiles, requests, splits), warps=WARPS,
    )  # fmt: skip


def attend_listed(
    tensors: tuple[Tensor, ...],
    numbers: tuple[object, ...],
    *,
    sizes: tuple[int, ...],
    tiles: int,
    block_size: int,
    halvings: int,
) -> None:
    """Compute latent attention over listed rows, if :func:`fits_listed`.

    Args:
        tensors, numbers: query, its rotary part, cache, positions, their number for each query, block table, query
            starts, out, partial results, their statistics; then strides, scale and heads.
        sizes: requests, splits, and the stride of the block table.
        tiles: tiles of ``LATENT_ROWS`` heads.
        block_size, halvings: slots of a block of the cache, and steps of the search for a token's request.
    """
    query, splits = tensors[0], sizes[1]
    items, most = tiles * len(query) * splits, processors(query.device)
    _launcher(LISTED)(
        (min(items, most), 1, 1), tensors, (*numbers, block_size, halvings, splits > 1, items > most),
        sizes=(tiles, len(query), *sizes), warps=WARPS,
    )  # fmt: skip


def score(
    tensors: tuple[Tensor, ...],
    strides: tuple[int, ...],
    *,
    sizes: tuple[int, ...],
    grid: tuple[int, int, int],
    block_size: int,
    constants: tuple[int, int, int, int],
) -> None:
    """Compute index scores, if :func:`fits_scores`.

    Args:
        tensors: query, its weights, which are contiguous, cache, scales, block table, query starts, lengths, scores.
        strides: of queries, weights, cache and scales.
        sizes: first query, queries, width of the scores, stride of the block table.
        grid: tiles of tokens, tiles of queries, requests.
        block_size: slots of a block of the cache.
        constants: consumers, tiles of each, queries of a program, stages.
    """
    _launcher(SCORES)(
        grid, tensors, (*strides, *tensors[0].shape[1:], block_size, *constants), sizes=sizes, warps=WARPS
    )
