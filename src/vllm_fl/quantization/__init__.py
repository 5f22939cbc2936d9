"""Quantized checkpoints in vLLM: its configurations and loaders, with our kernels of quantized layers.

:mod:`fl_dispatch.hosting.quantized` computes, :mod:`.kernels` and :mod:`.expert_method` register that with vLLM, and
:mod:`.configs` and :mod:`.methods` keep vLLM from requesting CUDA kernels. Importing this package imports nothing of
vLLM; it is registered only for quantized checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from fl_dispatch.devices import detect_device, device_specs
from fl_dispatch.hosting.quantized import remedies

SERVED: Mapping[str, str] = MappingProxyType(
    {
        "auto_awq": "awq",
        "auto_gptq": "gptq",
        "compressed-tensors": "compressed-tensors",
        "fp8": "fp8",
        "gpt_oss_mxfp4": "mxfp4",
        "inc": "auto-round",
        "modelopt": "modelopt",
        "modelopt_fp4": "modelopt",
        "modelopt_mxfp8": "modelopt",
        "quark": "quark",
    }
)
"""vLLM's names of the served methods → their names in checkpoints."""


def refused(what: str, remedy: str = "") -> ValueError:
    """Return the error for an unserved feature of a checkpoint; ``remedy``: a feature that works."""
    return ValueError(f"vllm_fl does not support {what} yet{remedy and f'; {remedy}'}")


@cache
def register() -> None:
    """Register kernels and configurations with vLLM. Idempotent."""
    from . import configs, kernels

    kernels.register()
    configs.register()


def verify(method: str) -> None:
    """Raise ``ValueError`` if a quantization method is not served here; otherwise register our configuration for it.

    Args:
        method: vLLM's name of the method.
    """
    from ..compat.versions import TESTED_HOSTS, host_version, is_tested
    from ..host import HOST

    device, name = detect_device(), SERVED.get(method, method)
    if method == "mxfp4":
        raise refused("quantization 'mxfp4' of another model than gpt-oss", remedies.of_method(method))
    if method not in SERVED and method in SERVED.values():
        raise ValueError(f"vllm_fl serves '{name}' only where the checkpoint's config.json has a quantization_config")
    if method not in SERVED:
        known = ", ".join(dict.fromkeys(SERVED.values()))
        raise ValueError(
            f"vllm_fl does not support quantization '{name}' yet (only {known}); {remedies.of_method(name)}"
        )
    if HOST.name not in device.quantized:
        where = ", ".join(sorted(spec.name for spec in device_specs() if HOST.name in spec.quantized))
        raise ValueError(f"vllm_fl does not support quantization '{name}' on {device.name} yet (only on {where})")
    if not is_tested():
        where = f"vLLM {host_version()} yet (only on {', '.join(TESTED_HOSTS)})"
        raise ValueError(f"vllm_fl does not support quantization '{name}' on {where}")
    register()
