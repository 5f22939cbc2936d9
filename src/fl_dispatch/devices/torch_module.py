"""Calls of PyTorch's module of a device, looked up at call time, because ``torch.npu`` exists only with its package."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch


def hook(torch_type: str, name: str) -> Callable[..., Any]:
    """Return the function ``torch.<torch_type>.<name>``, looked up at call time."""

    def call(*args: Any) -> Any:
        return getattr(getattr(torch, torch_type), name)(*args)

    return call


def count(torch_type: str, extension: str | None = None) -> int:
    """Return the number of devices of a type that PyTorch sees; its package is imported first, if installed."""
    if extension is not None and not hasattr(torch, torch_type) and importlib.util.find_spec(extension) is not None:
        importlib.import_module(extension)
    module = getattr(torch, torch_type, None)
    return int(module.device_count()) if module is not None else 0


def counter(torch_type: str, extension: str | None = None) -> Callable[[], int]:
    """Return :func:`count` as a function for a spec."""
    return lambda: count(torch_type, extension)


def attribute(torch_type: str, *names: str) -> Callable[[int], int]:
    """Return a function that reads the first known of these properties of a device by index; 0 if none is known.

    Reading properties may create a context.
    """

    def ask(index: int) -> int:
        properties = getattr(torch, torch_type).get_device_properties(index)
        return next((int(getattr(properties, name)) for name in names if hasattr(properties, name)), 0)

    return ask


def stream_handle(torch_type: str, attribute: str) -> Callable[[], int]:
    """Return a function that returns the current stream's handle, from this attribute of PyTorch's stream."""
    return lambda: int(getattr(getattr(torch, torch_type).current_stream(), attribute))


def functions(torch_type: str) -> dict[str, Any]:
    """Return the fields that nearly every device module answers under the same names."""
    return {
        "manual_seed": hook(torch_type, "manual_seed_all"),
        "synchronize": hook(torch_type, "synchronize"),
        "empty_cache": hook(torch_type, "empty_cache"),
        "compute_units": attribute(torch_type, "multi_processor_count", "cube_core_num", "gpu_eu_count"),
        "warp_size": attribute(torch_type, "warp_size"),
        "shared_memory": attribute(torch_type, "shared_memory_per_block_optin", "shared_memory_per_block"),
        "cache_bytes": attribute(torch_type, "L2_cache_size"),
    }
