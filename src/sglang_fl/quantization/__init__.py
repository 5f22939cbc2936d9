"""Quantized checkpoints in SGLang: its configurations and loaders, with our quantized layers and experts.

:mod:`.configs` reads a checkpoint's configuration and gives each layer one of the kinds of :mod:`.layers` or
:mod:`.expert_method`; :mod:`fl_dispatch.hosting.quantized` has the products. Importing this package imports nothing of
SGLang.
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
"""Served methods by SGLang's names → the class in :mod:`.configs`; checkpoints only say ``modelopt``.

``mxfp8`` is SGLang's name also for that of ``modelopt``.
"""


CONVERTED: Mapping[str, str] = MappingProxyType({"awq_marlin": "awq", "gptq_marlin": "gptq"})
"""SGLang's methods for NVIDIA GPUs, with its own kernels → the methods of the checkpoints that it takes for them."""
LATENT_MODELS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "DeepseekV3ForCausalLMNextN",
    "GlmMoeDsaForCausalLMNextN",
)
"""Served models with latent attention, and predictors: for others SGLang's loader splits a weight with its own code."""
GPT_OSS = "GptOssForCausalLM"
"""The model with experts that ``mxfp4`` quantizes; no other model has them."""
FP8_CACHE = "fp8_e4m3"
"""SGLang's name of the only served type of quantized cache."""


def refused(what: str, remedy: str = "") -> ValueError:
    """Return the error for an unserved feature of a checkpoint; ``remedy``: a feature that works."""
    return ValueError(f"sglang_fl does not support {what} yet{remedy and f'; {remedy}'}")


def config_class(method: str) -> type | None:
    """Return the configuration of a served method; ``None`` for other methods."""
    if method not in SERVED:
        return None
    from . import configs

    found: type = getattr(configs, SERVED[method])
    return found


def check_experts(original: Callable[[Any], None], runner: Any) -> None:
    """Run SGLang's check of experts in blocks for methods other than ours, which take a short last block."""
    if runner.model_config.quantization not in SERVED:
        original(runner)


def announce() -> None:
    """Add the methods to SGLang's list, because it lists GPTQ only for platforms that it knows.

    SGLang asks each listed class whether it takes a checkpoint of another method, so classes that do are replaced.
    """
    from sglang.srt.layers import quantization

    if host_version() not in TESTED_HOSTS:  # they are refused there
        return
    for method in SERVED:
        if method not in quantization.QUANTIZATION_METHODS:
            quantization.QUANTIZATION_METHODS[method] = config_class(method)
    for method in remedies.METHODS:  # SGLang would report an unknown method; our error names one that works
        quantization.QUANTIZATION_METHODS.setdefault(method, quantization.QUANTIZATION_METHODS["fp8"])
    for converted, method in CONVERTED.items():
        quantization.QUANTIZATION_METHODS[converted] = quantization.QUANTIZATION_METHODS[method]
