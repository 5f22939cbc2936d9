"""Questions to PyTorch's module of a device, looked up at the call: ``torch.npu`` exists once its package is there."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch


def hook(torch_type: str, name: str) -> Callable[..., Any]:
    """The function ``torch.<torch_type>.<name>``, looked up when it is called."""

    def call(*args: Any) -> Any:
        return getattr(getattr(torch, torch_type), name)(*args)

    return call


def count(torch_type: str, extension: str | None = None) -> int:
    """The number of devices of a type that PyTorch sees; its package is imported first, if it is there."""
    if extension is not None and not hasattr(torch, torch_type) and importlib.util.find_spec(extension) is not None:
        importlib.import_module(extension)
    module = getattr(torch, torch_type, None)
    return int(module.device_count()) if module is not None else 0


def counter(torch_type: str, extension: str | None = None) -> Callable[[], int]:
    """:func:`count` for a spec."""
    return lambda: count(torch_type, extension)


def attribute(torch_type: str, *names: str) -> Callable[[int], int]:
    """The first of these properties that PyTorch knows of the device with an index; 0 where it knows none.

    Asking for properties may create a context.
    """

    def ask(index: int) -> int:
        properties = getattr(torch, torch_type).get_device_properties(index)
        return next((int(getattr(properties, name)) for name in names if hasattr(properties, name)), 0)

    return ask


def stream_handle(torch_type: str, attribute: str) -> Callable[[], int]:
    """The handle of the current stream, which PyTorch's stream has in this attribute."""
    return lambda: int(getattr(getattr(torch, torch_type).current_stream(), attribute))


def functions(torch_type: str) -> dict[str, Any]:
    """The fields that nearly every module answers under the same names."""
    return {
        "manual_seed": hook(torch_type, "manual_seed_all"),
        "synchronize": hook(torch_type, "synchronize"),
        "empty_cache": hook(torch_type, "empty_cache"),
        "compute_units": attribute(torch_type, "multi_processor_count", "cube_core_num", "gpu_eu_count"),
        "warp_size": attribute(torch_type, "warp_size"),
        "shared_memory": attribute(torch_type, "shared_memory_per_block_optin", "shared_memory_per_block"),
        "cache_bytes": attribute(torch_type, "L2_cache_size"),
    }
