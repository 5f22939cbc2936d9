"""Whether Triton serves the device of this machine. Imports no Triton at import and creates no device context."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from .detect import detect_device

NOT_INSTALLED = "Triton is not installed"
FLOAT8_CAPABILITY = (8, 9)
"""The first compute capability for which Triton compiles float8_e4m3fn."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: ``TRITON_INTERPRET=1``."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def why_unavailable() -> str:
    """Return in words why the kernels cannot run here; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return NOT_INSTALLED
    if interpreted() or not (reason := why_unserved()):
        return ""
    return f"{reason} (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"


@functools.cache
def why_unserved() -> str:
    """Return in words why no Triton driver serves this machine's device; empty if one does.

    A driver says whether it is active, and which PyTorch device its tensors have. Its class is asked, because an
    instance compiles code and reads the current device, which needs a context.
    """
    if importlib.util.find_spec("triton") is None:
        return NOT_INSTALLED
    device = detect_device()
    if not device.triton:
        return f"Triton does not serve device '{device.name}'"
    from triton.backends import backends

    with _without_context():
        active = {name: _torch_type(backend.driver) for name, backend in backends.items() if backend.driver.is_active()}
    if device.torch_type in active.values():
        return ""
    found = ", ".join(f"{name} for '{torch_type}'" for name, torch_type in active.items()) or "none"
    return f"no driver of Triton's serves device '{device.name}' ('{device.torch_type}'; active drivers: {found})"


def _torch_type(driver: Any) -> str:
    """Return the PyTorch device type of tensors that a driver's kernels take; empty for a driver without an answer."""
    first = SimpleNamespace(get_current_device=lambda: 0)  # instead of an instance
    try:
        return str(driver.get_active_torch_device(first).type)
    except (AttributeError, TypeError, RuntimeError):
        return ""


def why_no_float8(capability: tuple[int, int] | None) -> str:
    """Return in words why Triton cannot compile float8_e4m3fn for a compute capability; empty if it can."""
    if capability is None or capability >= FLOAT8_CAPABILITY:
        return ""
    first, found = (f"{major}.{minor}" for major, minor in (FLOAT8_CAPABILITY, capability))
    return f"Triton compiles fp8 from compute capability {first} on, and this is {found}"


@contextmanager
def _without_context() -> Iterator[None]:
    """In this block PyTorch uses NVIDIA's management library to look for GPUs, because CUDA does not survive a fork."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
