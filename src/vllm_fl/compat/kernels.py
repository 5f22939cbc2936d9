"""The Triton kernels that vLLM's V1 model runner launches, as functions for a CPU.

vLLM 0.32 and later take them by name through ``register_kernels``; in 0.26 they are put in the kernels' places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import rejection
from . import versions
from .replacements import REJECTION_KERNELS, REJECTION_SAMPLER, SLOT_MAPPING_KERNEL


def slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slots: torch.Tensor,
    block_size: int,
    total_cp_world_size: int,
    total_cp_rank: int,
    cp_interleave: int,
    pad_id: int,
    *_: Any,
) -> None:
    """The cache slot of every token: ``block_table[request, position // block] * block + position % block``.

    Args:
        num_tokens, max_num_tokens: slots between these two are padding and get ``pad_id``.
        query_start_loc: ``[requests + 1]``; the requests' first tokens.
        positions: ``[tokens]``; position of each token in its sequence.
        block_table: ``[requests, blocks]``.
        slots: ``[max_num_tokens]``; overwritten.
    """
    if total_cp_world_size != 1:
        raise NotImplementedError("context parallelism is not supported by vllm_fl on this device")
    requests = torch.repeat_interleave(query_start_loc.diff())
    where = positions[: requests.shape[0]]
    blocks = block_table[requests, where // block_size].long()
    slots[: requests.shape[0]] = blocks * block_size + where % block_size
    slots[num_tokens:max_num_tokens] = pad_id


def replace_kernels() -> None:
    """Replace the Triton kernels that the V1 model runner launches. Idempotent."""
    if versions.host_version() == "0.26":
        return _replace_kernels_by_name()
    from vllm.triton_utils.dispatcher import KernelOverride, register_kernels
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    if not isinstance(ComputeSlotMappingKernel.kernel, KernelOverride):
        rejections = {f"{REJECTION_SAMPLER}.{name}": getattr(rejection, name) for name in REJECTION_KERNELS}
        register_kernels({SLOT_MAPPING_KERNEL: slot_mapping, **rejections})
    return None


class _Launched:
    """A function in the place of a Triton kernel, which is called as ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **constants: self._function(*arguments, *constants.values())


def _slot_mapping_of_0_26(*arguments: Any) -> None:
    """:func:`slot_mapping` with the parameters of vLLM 0.26: another order, and two sizes of blocks more."""
    *before, block_size, slots, _kv_cache_block_size, _blocks_per_kv_block = arguments[:10]
    slot_mapping(*before, slots, block_size, *arguments[10:])


def _replace_kernels_by_name() -> None:
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker import block_table
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner._postprocess_triton = lambda runner: None
    block_table._compute_slot_mapping_kernel = _Launched(_slot_mapping_of_0_26)
    for name in REJECTION_KERNELS:
        setattr(rejection_sampler, name, _Launched(getattr(rejection, name)))
