"""Facts about a GPU from NVIDIA's management library, without a CUDA context.

Hosts ask for a GPU's name, memory and capability in the parent process and fork afterwards, which a CUDA context does
not survive. PyTorch's own functions create one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

NAME_LENGTH = 96
NVIDIA = 0x10DE
"""NVIDIA's PCI vendor id; other vendors ship a library of the same name, but their chips have other ids."""


class NvmlError(RuntimeError):
    """The library is missing, or a call of it failed."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Pci(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_and_vendor", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Args:
        name: such as ``NVIDIA H200``.
        available, total: bytes of its memory.
        capability: compute capability.
    """

    name: str
    available: int
    total: int
    capability: tuple[int, int]


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise NvmlError(f"NVIDIA's management library does not load: {error}") from error
    _check(library.nvmlInit_v2(), "nvmlInit")
    return library


def sees_nvidia() -> bool:
    """Whether the library is on this machine, and its first device is NVIDIA's by its PCI vendor id."""
    handle, pci = ctypes.c_void_p(), _Pci()
    try:
        library = _library()
        _check(library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)), "nvmlDeviceGetHandleByIndex")
        _check(library.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci)), "nvmlDeviceGetPciInfo")
    except (NvmlError, AttributeError):  # another vendor's library of that name may lack a function
        return False
    return bool(pci.device_and_vendor & 0xFFFF == NVIDIA)


def _check(code: int, call: str) -> None:
    if code:
        raise NvmlError(f"{call} failed with code {code}")


def _handle(index: int) -> ctypes.c_void_p:
    """Return the GPU that PyTorch calls ``cuda:<index>``; ``CUDA_VISIBLE_DEVICES`` has numbers or UUIDs."""
    library, handle = _library(), ctypes.c_void_p()
    visible = torch.cuda._parse_visible_devices()
    if index >= len(visible):
        raise NvmlError(f"GPU {index} is not among the visible ones")
    chosen = visible[index]
    if isinstance(chosen, str):
        _check(library.nvmlDeviceGetHandleByUUID(chosen.encode(), ctypes.byref(handle)), "nvmlDeviceGetHandleByUUID")
    else:
        _check(library.nvmlDeviceGetHandleByIndex_v2(chosen, ctypes.byref(handle)), "nvmlDeviceGetHandleByIndex")
    return handle


def query(index: int = 0) -> Gpu:
    """Return the GPU that PyTorch calls ``cuda:<index>``.

    Raises:
        NvmlError: the library has no answer.
    """
    library, handle = _library(), _handle(index)
    name, memory = ctypes.create_string_buffer(NAME_LENGTH), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library.nvmlDeviceGetName(handle, name, NAME_LENGTH), "nvmlDeviceGetName")
    _check(library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), "nvmlDeviceGetMemoryInfo")
    _check(
        library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)),
        "nvmlDeviceGetCudaComputeCapability",
    )
    return Gpu(name.value.decode(), memory.free, memory.total, (major.value, minor.value))


def driver() -> str:
    """Return the version of the driver; empty if the library has no answer."""
    version = ctypes.create_string_buffer(NAME_LENGTH)
    try:
        _check(_library().nvmlSystemGetDriverVersion(version, NAME_LENGTH), "nvmlSystemGetDriverVersion")
    except NvmlError:
        return ""
    return version.value.decode()
