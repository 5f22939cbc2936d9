"""Quantized checkpoints in vLLM: its configurations and loaders, with our kernels of quantized layers.

:mod:`fl_dispatch.hosting.quantized` computes, :mod:`.kernels` and :mod:`.expert_method` register that with vLLM, and
:mod:`.configs` and :mod:`.methods` keep vLLM from requesting CUDA kernels. Importing this package imports nothing of
vLLM; it is registered only for quantized checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from fl_dispatch.devices import detect_device, device_specs
from fl_dispatch.hosting.quantized import remedies


class Method(NamedTuple):
    """A served method.

    Args:
        name: its name in checkpoints.
        config: the class in :mod:`.configs` that reads their configuration.
    """

    name: str
    config: str


SERVED: Mapping[str, Method] = MappingProxyType(
    {
        "auto_awq": Method("awq", "AWQConfigFL"),
        "auto_gptq": Method("gptq", "GPTQConfigFL"),
        "compressed-tensors": Method("compressed-tensors", "CompressedTensorsConfigFL"),
        "fp8": Method("fp8", "Fp8ConfigFL"),
        "gpt_oss_mxfp4": Method("mxfp4", "Mxfp4ConfigFL"),
        "inc": Method("auto-round", "AutoRoundConfigFL"),
        "modelopt": Method("modelopt", "ModelOptFp8ConfigFL"),
        "modelopt_fp4": Method("modelopt", "ModelOptNvfp4ConfigFL"),
        "modelopt_mxfp8": Method("modelopt", "ModelOptMxfp8ConfigFL"),
        "quark": Method("quark", "QuarkConfigFL"),
    }
)
"""The served methods by vLLM's names."""


def refused(what: str, remedy: str = "") -> ValueError:
    """Return the error for an unserved feature of a checkpoint; ``remedy``: a feature that works."""
    return ValueError(f"vllm_fl does not support {what} yet{remedy and f'; {remedy}'}")


@cache
def register() -> None:
    """Register kernels and configurations with vLLM. Idempotent."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from . import configs, kernels

    kernels.register()
    for name, method in SERVED.items():
        register_quantization_config(name)(getattr(configs, method.config))


def verify(method: str) -> None:
    """Raise ``ValueError`` if a quantization method is not served here; otherwise register our configuration for it.

    Args:
        method: vLLM's name of the method.
    """
    from ..compat.versions import TESTED_HOSTS, host_version, is_tested
    from ..host import HOST

    known = dict.fromkeys(served.name for served in SERVED.values())
    device, name = detect_device(), SERVED[method].name if method in SERVED else method
    if method == "mxfp4":
        raise refused("quantization 'mxfp4' of another model than gpt-oss", remedies.of_method(method))
    if method not in SERVED and method in known:
        raise ValueError(f"vllm_fl serves '{name}' only where the checkpoint's config.json has a quantization_config")
    if method not in SERVED:
        raise ValueError(
            f"vllm_fl does not support quantization '{name}' yet (only {', '.join(known)}); {remedies.of_method(name)}"
        )
    if HOST.name not in device.quantized:
        where = ", ".join(sorted(spec.name for spec in device_specs() if HOST.name in spec.quantized))
        raise ValueError(f"vllm_fl does not support quantization '{name}' on {device.name} yet (only on {where})")
    if not is_tested():
        where = f"vLLM {host_version()} yet (only on {', '.join(TESTED_HOSTS)})"
        raise ValueError(f"vllm_fl does not support quantization '{name}' on {where}")
    register()
