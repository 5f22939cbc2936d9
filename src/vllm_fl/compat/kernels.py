"""The Triton kernels that vLLM's V1 model runner launches, as functions of PyTorch.

vLLM accepts them by name, through its ``register_kernels``.
"""

from __future__ import annotations

from typing import Any

import torch

from fl_dispatch.devices import detect_device

from ..runner_kernels import rejection
from ..runner_kernels.states import batch_memcpy

SLOT_MAPPING_KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
COMPILED = "compute_slot_mapping_kernel_impl"
"""vLLM's CPU build of the kernel; its library is loaded if ``vendor.cpu`` runs."""
REJECTION_SAMPLER = "vllm.v1.sample.rejection_sampler"
STATE_COPY_KERNEL = "vllm.v1.worker.mamba_utils.batch_memcpy_kernel"
REJECTION_KERNELS = (
    "rejection_greedy_sample_kernel",
    "rejection_random_sample_kernel",
    "expand_kernel",
    "sample_recovered_tokens_kernel",
)


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
    """Write the cache slot of every token: ``block_table[request, position // block] * block + position % block``.

    The host does not wait for the device. Slots of tokens that no request covers stay unchanged.

    Args:
        num_tokens, max_num_tokens: slots between these two are padding and get ``pad_id``.
        query_start_loc: ``[requests + 1]``; the requests' first tokens.
        positions: ``[tokens]``; position of each token in its sequence.
        block_table: ``[requests, blocks]``.
        slots: ``[max_num_tokens]``; overwritten.
    """
    if total_cp_world_size != 1:
        raise NotImplementedError("context parallelism is not supported by vllm_fl on this device")
    if not detect_device().accelerator and hasattr(torch.ops._C, COMPILED):
        getattr(torch.ops._C, COMPILED)(query_start_loc, positions, block_table, slots, block_size)
    else:
        in_pytorch(slots[:num_tokens], query_start_loc, positions[:num_tokens], block_table, block_size)
    slots[num_tokens:max_num_tokens] = pad_id


def in_pytorch(
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> None:
    """Compute the cache slots of a batch's tokens in PyTorch; ``slots`` and ``positions`` are ``[tokens]``."""
    token = torch.arange(len(slots), dtype=query_start_loc.dtype, device=query_start_loc.device)
    request = torch.searchsorted(query_start_loc[1:], token, right=True).clamp_(max=query_start_loc.shape[0] - 2)
    found = block_table[request, positions // block_size].long() * block_size + positions % block_size
    slots.copy_(torch.where(token < query_start_loc[-1], found, slots))


def replace_kernels() -> None:
    """Replace the Triton kernels that the V1 model runner launches. Idempotent."""
    from vllm.triton_utils.dispatcher import KernelOverride, register_kernels
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    if not isinstance(ComputeSlotMappingKernel.kernel, KernelOverride):
        rejections = {f"{REJECTION_SAMPLER}.{name}": getattr(rejection, name) for name in REJECTION_KERNELS}
        register_kernels({SLOT_MAPPING_KERNEL: slot_mapping, STATE_COPY_KERNEL: batch_memcpy, **rejections})
