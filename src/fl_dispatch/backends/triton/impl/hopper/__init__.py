"""Attention for Hopper alone, in Gluon: the tensors that its kernels take, and their launch.

The plain kernels compute a tile's softmax and its products one after the other. Here warps specialize: producers load,
consumers multiply, and the tensor cores work while a softmax is computed. :mod:`.prefill` is for many queries of a
request, :mod:`.latent_decode` for decoding of latent attention; both stand on :mod:`.pipeline`, and ``docs/hopper.md``
draws who waits for whom. They need instructions of one chip and an experimental part of Triton, so they are taken on
compute capability 9, with a tested version, for the shapes and options that they have. Everything else takes the plain
kernel, and ``VLLM_FL_CHIP_FEATURES=0`` makes everything do so.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from fl_dispatch.devices import CUDA, device_of
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from ..launch import INTERPRETED, Launcher

logger = get_logger(__name__)

TESTED = ((3, 6), (3, 8))
"""Versions of Triton with which the kernels are tested and measured on a GPU."""
CAPABILITY = 9
DIMENSIONS = {64: (64, 0), 128: (128, 0), 192: (128, 64)}
"""Sizes of a head's key, as a power of two and the rest."""
VALUE_DIMENSIONS = (64, 128)
LATENT_RANK, LATENT_ROPE = 512, 64
"""Rank and rotary part of the latent rows: those of DeepSeek-V2 and V3."""
LATENT_ROWS, LATENT_KEYS = 64, 64
"""Tile of the kernel for latent attention."""
ALIGNMENT = 16
"""Divisor of strides and of pointers, which the compiler has to know, because copies move 16 bytes."""
WARPS = 4
"""Warps of each consumer."""
LIMIT = 1 << 31
FORMS: dict[str, tuple[int, int, int, int]] = {
    # warps of the producer, registers of a consumer's and of the producer's thread, what consumers do beside products
    "bulk": (1, 224, 56, 0),
    "bulk-both": (1, 224, 56, 3),
    "bulk-fa3": (1, 224, 56, 5),  # what FlashAttention 3 does for this size
    "bulk-all": (1, 224, 56, 7),
    "bulk-240-all": (1, 240, 24, 7),
    "bulk-4-all": (4, 216, 72, 7),
    "threads-all": (0, 216, 72, 7),
}
"""Trial: forms of prefill with copies in bulk, and one (no warps) with copies by each thread, which is for both."""
FORM = ""
"""Trial: the form of prefill, a name of ``FORMS``, or else that of today."""


def why_unavailable(device: torch.device) -> str:
    """Return why the kernels cannot run on a device, or an empty string; logged once."""
    return _why_unavailable(device, get_settings().chip_features)


@functools.cache
def _why_unavailable(device: torch.device, chip_features: bool) -> str:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    spec = device_of(device.type)
    if INTERPRETED or spec.vendor != CUDA.vendor:
        return "not an NVIDIA GPU"
    if (spec.capability(device.index or 0) or (0, 0))[0] != CAPABILITY:
        return f"the device is not of compute capability {CAPABILITY}"
    reason = ""
    if not chip_features:
        reason = f"chip_features is off ({get_settings().origin('chip_features')})"
    elif version not in TESTED:
        reason = f"it is not tested with Triton {triton.__version__}"
    else:
        try:
            _launcher()
            _latent_launcher()
        except ImportError as error:
            reason = f"Triton's Gluon lacks something: {error}"
    if reason:
        logger.info("Attention on %s takes the plain Triton kernels, not those for Hopper: %s", device, reason)
    return reason


@functools.cache
def _launcher() -> Launcher:
    """Imports Gluon, which not every Triton has."""
    from .prefill.kernel import attention

    return Launcher(attention)


@functools.cache
def _bulk_launcher() -> Launcher:
    """Imports Gluon, which not every Triton has."""
    from .prefill.bulk import attention_bulk

    return Launcher(attention_bulk)


def _descriptor(tensor: Tensor) -> object:
    """A tensor ``[tokens, heads, dim]`` for copies in bulk, which :mod:`.prefill.bulk` explains.

    Made without Triton's checks, which take 20 µs: :func:`fits` has made them.
    """
    kind, layout = _descriptor_parts()
    token, head, _ = tensor.stride()
    made = object.__new__(kind)
    made.base = tensor
    made.shape = [0x7FFF0000, 0x7FFF0000, 1 << 30, (tensor.shape[1] - 1) * head + tensor.shape[2]]
    made.strides = [(1 << 34) - token, token, token, 1]
    made.block_shape, made.layout, made.padding, made.round_f32_to_tf32 = [1, 1, 128, 64], layout, "zero", False
    return made


@functools.cache
def _descriptor_parts() -> tuple[Any, Any]:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor, NVMMASharedLayout(128, 16, 4)


@functools.cache
def _latent_launcher() -> Launcher:
    """Imports Gluon, which not every Triton has."""
    from .latent_decode.kernel import latent_attention

    return Launcher(latent_attention)


@functools.cache
def _processors(device: torch.device) -> int:
    return device_of(device.type).compute_units(device.index or 0)


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the prefill kernel takes these tensors, whose last dimension is a head's."""
    if why_unavailable(query.device):
        return False
    if query.shape[-1] not in DIMENSIONS or value.shape[-1] not in VALUE_DIMENSIONS:
        return False
    return _aligned_halves(query, key, value)


def fits_latent(query: Tensor, kv_cache: Tensor, kv_lora_rank: int) -> bool:
    """Return whether the kernel for decoding of latent attention takes these tensors."""
    if why_unavailable(query.device):
        return False
    if kv_lora_rank != LATENT_RANK or query.shape[-1] != LATENT_RANK + LATENT_ROPE:
        return False
    return _aligned_halves(query, kv_cache)


def _aligned_halves(*tensors: Tensor) -> bool:
    """Return whether all have one half type, and rows that the kernels can copy."""
    dtype = tensors[0].dtype
    if dtype not in (torch.float16, torch.bfloat16) or any(tensor.dtype != dtype for tensor in tensors):
        return False
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
    """Attention of the requests with at least ``least_new`` new tokens, if :func:`fits`; no window, cap or bias.

    Args:
        narrow: the blocks of both caches lie within 2**31 elements.
        others: as those of :data:`fl_dispatch.ops.attention.paged_attention`.
    """
    warps, _, _, beside = FORMS.get(FORM, (0, 0, 0, 0))
    heads = query.shape[1]
    slots, kv_heads = key_cache.shape[1:3]
    for _, slot, head, _ in (key_cache.stride(), value_cache.stride()):
        narrow = narrow and max(slots * slot, kv_heads * head) < LIMIT
    _launch(
        (query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out, out),
        (seq_lens.shape[0], heads, least_new, 0),
        (
            query.stride(0), query.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3], out.stride(0),
            out.stride(1), block_table.stride(0), scale, heads // kv_heads, True, slots, causal, False,
            *DIMENSIONS[query.shape[2]], value_cache.shape[3], beside if not warps else 0, narrow,
        ),
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
    """Attention over keys in a row, with as many heads as queries have; see :data:`fl_dispatch.ops.mla.mla_prefill`."""
    warps, registers, others, beside = FORMS.get(FORM, (0, 0, 0, 0))
    if warps:
        descriptors: tuple[Any, ...] = tuple(map(_descriptor, (query, key, value)))
        _bulk_launcher()(
            (_processors(query.device), 1, 1),
            (query_start_loc, key_start_loc, out, lse),
            (
                query.stride(1), key.stride(1), value.stride(1), out.stride(0), out.stride(1), scale, causal,
                *DIMENSIONS[query.shape[2]], value.shape[2], warps, registers, others, beside,
            ),
            sizes=(*descriptors, query_start_loc.shape[0] - 1, query.shape[1], lse.stride(0)),
            warps=WARPS,
        )  # fmt: skip
        return
    _launch(
        (query, key, value, key_start_loc, query_start_loc, key_start_loc, out, lse),
        (query_start_loc.shape[0] - 1, query.shape[1], 0, lse.stride(0)),
        (
            query.stride(0), query.stride(1), 0, *key.stride()[:2], 0, *value.stride()[:2], out.stride(0),
            out.stride(1), 0, scale, 1, False, 1, causal, True, *DIMENSIONS[query.shape[2]], value.shape[2], beside,
            False,
        ),
    )  # fmt: skip


def latent_slots(device: torch.device) -> int:
    """Programs of the kernel for latent attention that the device runs at a time."""
    return _processors(device)


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
    """Decoding of latent attention, if :func:`fits_latent`.

    Args:
        tensors, numbers: query, cache, block table, query starts, lengths, out, partial results, their statistics; then
            strides, scale and heads, as the plain kernel takes them.
        tiles: of ``LATENT_ROWS`` rows.
        splits: programs that share a request's keys; more than one write parts, each of some tiles of ``LATENT_KEYS``.
        block_size, causal, most_new: slots of a block of the cache, and what the plain kernel knows of the queries.
    """
    _latent_launcher()(
        (tiles, requests, splits), tensors, (*numbers, block_size, causal, most_new, splits > 1), sizes=(splits,),
        warps=WARPS,
    )  # fmt: skip


def _launch(tensors: tuple[Tensor, ...], sizes: tuple[int, ...], numbers: tuple[object, ...]) -> None:
    _launcher()((_processors(tensors[0].device), 1, 1), tensors, numbers, sizes=sizes, warps=WARPS)
