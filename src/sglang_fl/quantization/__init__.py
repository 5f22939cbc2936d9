"""Quantized checkpoints in SGLang: its configurations and loaders, with our quantized layers and experts.

:mod:`.configs` reads what a checkpoint says and gives each layer one of the kinds of :mod:`.layers` or
:mod:`.experts`; the products are those of :mod:`fl_dispatch.hosting.quantized`. Importing this package imports nothing
of SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fl_dispatch.hosting.quantized import remedies

from ..version import TESTED_HOSTS, host_version

SERVED: Mapping[str, str] = MappingProxyType(
    {
        "auto-round": "AutoRoundConfigFL",
        "awq": "AWQConfigFL",
        "gptq": "GPTQConfigFL",
        "compressed-tensors": "CompressedTensorsConfigFL",
        "fp8": "Fp8ConfigFL",
        "mxfp4": "Mxfp4ConfigFL",
        "modelopt_fp8": "ModelOptFp8ConfigFL",
        "modelopt_fp4": "ModelOptFp4ConfigFL",
        "mxfp8": "ModelOptMxfp8ConfigFL",
        "quark": "QuarkConfigFL",
    }
)
"""The methods that are served, by SGLang's names → the class in :mod:`.configs`; checkpoints say ``modelopt`` alone.

``mxfp8`` is SGLang's name for that of ``modelopt`` too.
"""


CONVERTED: Mapping[str, str] = MappingProxyType({"awq_marlin": "awq", "gptq_marlin": "gptq"})
"""SGLang's methods for NVIDIA GPUs, which it takes for checkpoints of others → those. They run kernels of its own."""
LATENT_MODELS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
)
"""Models with latent attention that are served: SGLang's loader of others splits a weight by code of its own."""
GPT_OSS = "GptOssForCausalLM"
"""Model with experts that ``mxfp4`` quantizes; no other has them."""
FP8_CACHE = "fp8_e4m3"
"""SGLang's name of the one type of quantized cache that is served."""


def refused(what: str, remedy: str = "") -> ValueError:
    """The error for an unserved feature of a checkpoint; ``remedy``: a feature that works."""
    return ValueError(f"sglang_fl does not support {what} yet{remedy and f'; {remedy}'}")


def config_class(method: str) -> type | None:
    """The configuration of a method that is served; ``None`` for another one."""
    if method not in SERVED:
        return None
    from . import configs

    found: type = getattr(configs, SERVED[method])
    return found


def check_experts(original: Callable[[Any], None], runner: Any) -> None:
    """SGLang's check of experts in blocks, for methods that are not ours: ours take a short last block."""
    if runner.model_config.quantization not in SERVED:
        original(runner)


def announce() -> None:
    """Add the methods to SGLang's list of those that exist: it lists GPTQ for the platforms alone that it knows.

    In that list each class is asked whether it takes a checkpoint of another method, so those that do are exchanged.
    """
    from sglang.srt.layers import quantization

    if host_version() not in TESTED_HOSTS:  # they are refused there
        return
    for method in SERVED:
        if method not in quantization.QUANTIZATION_METHODS:
            quantization.QUANTIZATION_METHODS[method] = config_class(method)
    for method in remedies.METHODS:  # SGLang would say that it does not know one; we say what works
        quantization.QUANTIZATION_METHODS.setdefault(method, quantization.QUANTIZATION_METHODS["fp8"])
    for converted, method in CONVERTED.items():
        quantization.QUANTIZATION_METHODS[converted] = quantization.QUANTIZATION_METHODS[method]
