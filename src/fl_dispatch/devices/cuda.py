"""NVIDIA's GPUs, excluding other vendors' chips that PyTorch also calls ``cuda``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..logger_manager import get_logger
from . import nvml
from .spec import TRITON, DeviceSpec
from .torch_module import counter, functions
from .unowned import over_its_storage

logger = get_logger(__name__)

DRIVER_FILES = ("dev/nvidiactl", "dev/nvidia[0-9]*", "dev/dxg", "dev/nvmap", "proc/driver/nvidia")
"""Files that NVIDIA's drivers create on servers, under Windows' Linux, and on Jetson boards."""


ROOT = Path("/")
"""The root below which signs of the driver are searched."""


def has_file(*patterns: str, root: Path) -> bool:
    """Whether a file with one of these names exists; patterns are relative to the root."""
    return any(next(root.glob(pattern), None) is not None for pattern in patterns)


def _gpu(index: int) -> nvml.Gpu:
    """Return an NVIDIA GPU; through a CUDA context if its management library is missing, as in some containers."""
    try:
        return nvml.query(index)
    except nvml.NvmlError as error:
        logger.debug("GPU %d is asked through CUDA: %s", index, error)
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        return nvml.Gpu(name, *torch.cuda.mem_get_info(index), capability)


def _is_nvidia() -> bool:
    """Whether the GPU is NVIDIA's: ROCm builds have ``torch.cuda``, too, and other vendors' builds a CUDA version."""
    return torch.version.cuda is not None and count() > 0 and (has_file(*DRIVER_FILES, root=ROOT) or nvml.sees_nvidia())


@contextmanager
def _refuse_waits() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


NATIVE_ATOMICS = 3
"""``CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`` of the driver's interface."""


def _shares_memory(device: int, other: int) -> bool:
    """Whether devices share memory with atomics, usually over NVLink: PCI Express has no such atomic operations."""
    if not torch.cuda.can_device_access_peer(device, other):
        return False
    atomics = ctypes.c_int()
    failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(atomics), NATIVE_ATOMICS, device, other)
    return not failed and bool(atomics.value)


count = counter("cuda")

CUDA = DeviceSpec(
    name="cuda",
    vendor="cuda",
    torch_type="cuda",
    dispatch_key="CUDA",
    dist_backend="nccl",
    platform_config="cuda",
    visible_devices="CUDA_VISIBLE_DEVICES",
    priority=10,
    verified={"vLLM": "served on an H100 and an H200", "SGLang": "served on an H100 and an H200"},
    forks=True,
    float8=True,
    quantized=("vLLM", "SGLang"),
    quantized_latent=("vLLM", "SGLang"),
    float64=True,
    pin_memory=True,
    writes_pinned_memory=True,
    inductor=TRITON,
    graphs=True,
    unowned_view=over_its_storage,
    model_runners=("v1", "v2"),
    host_kernels={"SGLang": "cuda"},
    native_platforms={"vLLM": "vllm_fl.platform.cuda.CudaPlatformFL"},
    replaces_aten=False,
    detect=_is_nvidia,
    device_count=count,
    device_name=lambda index: _gpu(index).name,
    memory=lambda index: (_gpu(index).available, _gpu(index).total),
    driver=nvml.driver,
    capability=lambda index: _gpu(index).capability,
    refuse_waits=_refuse_waits,
    shares_memory=_shares_memory,
    **functions("cuda"),
)
