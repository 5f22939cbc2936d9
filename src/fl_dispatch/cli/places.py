"""Dtypes and devices on the command line."""

from __future__ import annotations

import torch

from ..devices import detect_device, device_of, device_specs
from ..errors import DispatchError, text_of
from ..evidence.verify import DTYPES

NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES, torch.float64)}


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that a command line names.

    Raises:
        DispatchError: operators are not tested in such a dtype.
    """
    if name not in NAMES:
        raise DispatchError(f"unknown dtype '{name}'; there are {', '.join(NAMES)}")
    return NAMES[name]


def device_named(name: str | None) -> torch.device:
    """Return the device that a command line names, by default this machine's.

    Raises:
        DispatchError: PyTorch does not know the device or cannot use it here, or no spec describes it.
    """
    spec = detect_device()
    wanted = name or spec.torch_type
    whose = "" if name else f", which the device '{spec.name}' has as its torch type"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:  # its text lists all of PyTorch's device types
        specs = {spec.torch_type: spec for spec in device_specs()}
        if (described := specs.get(wanted.partition(":")[0])) is not None:
            described.check()
        types = ", ".join(sorted(specs))
        raise DispatchError(f"PyTorch knows no device '{wanted}'{whose}; device types are {types}") from error
    if device.type == "meta":
        raise DispatchError("device 'meta': its tensors hold no data, so there is nothing to run on")
    device_of(device.type)
    try:
        torch.zeros(1, device=device)
    except Exception as error:  # a chip's extension may raise anything; the command ends with one message
        raise DispatchError(f"PyTorch cannot use the device '{wanted}'{whose}: {text_of(error)}") from error
    return device
