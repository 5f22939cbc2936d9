"""Sizes of a launch: the elements that a program takes at a time, and the resources of a device."""

from __future__ import annotations

import functools

import torch

from fl_dispatch.devices import CUDA, device_of
from fl_dispatch.devices.triton import why_no_float8


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


@functools.cache
def fitting(length: int, most: int) -> int:
    """Return the elements of a row to take at a time: ``most``, or half of it if that leaves fewer lanes idle.

    Both are powers of two.

    Up to an eighth of the lanes may stay idle, because more elements at a time keep more loads in flight.
    """
    block = min(most, power_of_two(length))
    whole, halved = (-(-length // size) * size for size in (block, max(1, block // 2)))
    return block // 2 if 7 * whole > 8 * length and halved < whole else block


def row_warps(block: int) -> int:
    """Return the warps of a program that holds ``block`` elements of a row."""
    return 4 if block <= 4096 else 8 if block <= 8192 else 16


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of a device's compute units: the fewest programs that run at a time."""
    return device_of(device.type).compute_units(device.index or 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have, 0 if unknown."""
    return device_of(device.type).shared_memory(device.index or 0)


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; ``None`` for other devices."""
    return device_of(device.type).capability(device.index or 0) if device.type == CUDA.torch_type else None


def compiles(dtype: torch.dtype, device: torch.device) -> bool | str:
    """Whether kernels with this dtype compile for a device, or why fp8 does not."""
    if not dtype.is_floating_point or dtype.itemsize > 1:
        return True
    return why_no_float8(capability(device)) or True


def stages_that_fit(device: torch.device, stage: int, wanted: int) -> int:
    """Return how many stages of ``stage`` bytes fit into shared memory: at most ``wanted``, at least two."""
    room = shared_memory(device)
    return max(2, min(wanted, room // stage)) if room else wanted
