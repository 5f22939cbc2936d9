"""Check whether ``torch_npu`` finds an NPU."""

from __future__ import annotations

import importlib.util

from fl_dispatch.devices import ASCEND, detect_device

VENDOR = "ascend"


def why_unavailable() -> str:
    """Return why kernels cannot run here, or an empty string. Creates no device context."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    device = detect_device()
    if device.torch_type == ASCEND.torch_type and device.vendor != VENDOR:
        return f"the NPU is the device '{device.name}', which runs the implementations of '{device.vendor}'"
    return "" if ASCEND.detect() else "no Ascend NPU that PyTorch can use"
