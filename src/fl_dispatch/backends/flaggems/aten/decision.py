"""Decide whether to replace ATen operators, without importing FlagGems."""

from __future__ import annotations

import torch

from fl_dispatch.backends.flaggems import library
from fl_dispatch.devices import DeviceSpec
from fl_dispatch.settings import Settings

from .names import aten_names


def why_not(settings: Settings, device: DeviceSpec) -> str:
    """Return why no ATen operator is replaced, as a message, or an empty string.

    Without a setting the device decides. On NVIDIA GPUs PyTorch's own kernels stay, because no measurement shows that
    FlagGems' kernels serve faster; see ``docs/measured/gpu.md``.
    """
    if not settings.policy.enabled:
        return f"dispatch is off ({settings.origin('enabled')})"
    if not settings.policy.use_flaggems:
        return f"FlagGems is switched off ({settings.origin('use_flaggems')})"
    if settings.policy.batch_invariant:
        return f"FlagGems does not promise batch invariance ({settings.origin('batch_invariant')})"
    if not device.triton:
        return f"FlagGems has no kernels for device '{device.name}'"
    if settings.aten_replacement is False:
        return f"aten_replacement is off ({settings.origin('aten_replacement')})"
    listed = settings.policy.flagos_whitelist
    if listed is not None and not aten_names(listed):
        return f"the white-list names no ATen operator ({settings.origin('flagos_whitelist')})"
    if listed is None and settings.aten_replacement is None and not device.replaces_aten:
        return f"on device '{device.name}' only aten_replacement, or a white-list of ATen operators, asks for it"
    if not hasattr(torch.library, "get_kernel"):
        return f"PyTorch {torch.__version__} does not hand out its own kernels, which ours are compared with"
    return library.why_missing()
