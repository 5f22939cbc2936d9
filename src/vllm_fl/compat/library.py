"""Replace vLLM's compiled library on a GPU, in vLLM's GPU worker and its V2 model runner.

The replaced functions are: host memory that a GPU reads, references that do not keep memory alive, the warm-up of
kernels, and a rank group's work before a capture.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fl_dispatch.devices import DeviceSpec, detect_device
from fl_dispatch.devices.triton import why_unserved
from fl_dispatch.hosting.layers.attribute import Attached

BUFFERS = "vllm.v1.worker.gpu.buffer_utils"
Capture = Callable[..., AbstractContextManager[Any]]
ORIGINAL = Attached[Capture]("fl_original")
"""The original of vLLM's function that ours replaces."""


class _HostMemory:
    """Pinned memory in CUDA's array interface; a tensor made from it keeps it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": tuple(tensor.shape),
            "typestr": tensor.numpy().dtype.str,
            "strides": tuple(step * tensor.element_size() for step in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }


def gpu_view(cpu_tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the current GPU over the memory of a pinned tensor, which has the same address on both sides.

    Raises:
        ValueError: the tensor is not pinned.
    """
    if not cpu_tensor.is_pinned():
        raise ValueError("a GPU can only read host memory that is pinned")
    device = detect_device().place(torch.accelerator.current_device_index())
    return torch.as_tensor(_HostMemory(cpu_tensor), device=device)


def unowned_views(device: DeviceSpec) -> Callable[[Any], Any]:
    """Return a function that views a device tensor's memory without keeping it alive, and returns all else."""

    def unowned_view(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.get_device() < 0 or not tensor.numel():
            return tensor
        return device.unowned_view(tensor)

    return unowned_view


def warm_up_kernels(worker: Any, *, process_local_only: bool = False) -> None:
    """Compile the Triton kernels that the V1 model runner has registered; the other runners' are warm after a batch."""
    if why_unserved():
        return
    if not worker.use_v2_model_runner and not worker.model_runner.is_pooling_model:
        worker.model_runner.jit_warmup_registry.warmup()


def do_without_library(any_communicator: Callable[[Capture], Capture]) -> None:
    """Replace the functions of vLLM's compiled library in its GPU worker and its V2 model runner. Idempotent.

    Args:
        any_communicator: wraps ``GroupCoordinator.graph_capture`` for groups with our communicator.
    """
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.utils import torch_utils
    from vllm.v1.worker import gpu_worker

    from vllm.compilation import breakable_cudagraph

    buffers: Any = importlib.import_module(BUFFERS)
    buffers.get_accelerator_view_from_cpu_tensor = gpu_view
    torch_utils.weak_ref_tensor = breakable_cudagraph.weak_ref_tensor = unowned_views(detect_device())
    gpu_worker.kernel_warmup = warm_up_kernels
    original = GroupCoordinator.graph_capture
    if ORIGINAL.find(original) is None:
        GroupCoordinator.graph_capture = any_communicator(original)
        ORIGINAL.give(GroupCoordinator.graph_capture, original)
