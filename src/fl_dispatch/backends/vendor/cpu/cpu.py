"""The CPU backend, in parts that need different things: a KV cache in the layout of its kernels, certain processors.

It has no ``gemma_rms_norm``, because the kernels round the scale to the input dtype.
"""

from __future__ import annotations

import functools

from fl_dispatch.backends.base import Backend
from fl_dispatch.devices import detect_device

from . import library
from .impl import (
    activation,
    attention,
    experts,
    linear,
    normalization,
    own_attention,
    own_experts,
    own_integers,
    own_quantization,
    quantization,
    recurrent,
    rotary,
    state_space,
)


class _Compiled(Backend):
    """Name, vendor and availability, which both parts share."""

    @property
    def name(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def vendor(self) -> str:
        """``cpu``."""
        return "cpu"

    def is_available(self) -> bool:
        """Whether the kernels are loaded; the first call in a process loads them."""
        return not self.why_unavailable()

    def why_unavailable(self) -> str:
        """Why they are not."""
        return library.why_unavailable()


class CpuBackend(_Compiled):
    """The compiled CPU kernels of vLLM's CPU build, wherever that build is installed."""

    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_and_mul = staticmethod(activation.gelu_and_mul)
    rms_norm = staticmethod(normalization.rms_norm)
    rotary_embedding = staticmethod(rotary.rotary_embedding)
    quantize = staticmethod(quantization.quantize)


class CpuProductsBackend(_Compiled):
    """Its products with repacked weights."""

    linear = staticmethod(linear.linear)

    def why_unavailable(self) -> str:
        """Why the kernels are not loaded, or are not for this machine's models."""
        return _elsewhere() or library.why_unavailable()


class CpuExpertsBackend(_Compiled):
    """Its experts of a mixture, where the build for this processor has them."""

    fused_moe = staticmethod(experts.fused_moe)

    def why_unavailable(self) -> str:
        """Why the kernels are not loaded, or not there."""
        return library.why_unavailable() or library.why_missing(experts.KERNELS)


class OneDnnBackend(_Compiled):
    """PyTorch's products with repacked or quantized weights, which need no build of vLLM's."""

    linear = staticmethod(linear.linear_reordered)
    scaled_linear = staticmethod(quantization.scaled_linear)
    weight_only_linear = staticmethod(quantization.weight_only_linear)

    def why_unavailable(self) -> str:
        """Why PyTorch has none."""
        return _elsewhere() or linear.why_no_onednn()


class CpuAttentionBackend(_Compiled):
    """Its attention kernels, if they keep keys and values where we say they do."""

    kv_cache_write = staticmethod(attention.kv_cache_write)
    paged_attention = staticmethod(attention.paged_attention)

    def why_unavailable(self) -> str:
        """Why the kernels are not loaded, or not those that we know."""
        return library.why_unavailable() or _layout_problem()


class CpuOwnBackend(_Compiled):
    """Attention in C++ of this project, which needs a compiler and no build of vLLM's."""

    kv_cache_write = staticmethod(own_attention.kv_cache_write)
    paged_attention = staticmethod(own_attention.paged_attention)

    def why_unavailable(self) -> str:
        """Why it does not compile, or is not for this machine's models."""
        return _elsewhere() or own_attention.why_unavailable()


class CpuOwnExpertsBackend(_Compiled):
    """Experts in C++ of this project, likewise."""

    fused_moe = staticmethod(own_experts.fused_moe)

    def why_unavailable(self) -> str:
        """Why they do not compile, or are not for this machine's models."""
        return _elsewhere() or own_experts.why_unavailable()


class CpuOwnIntegersBackend(_Compiled):
    """Products of quantized rows in C++ of this project, which need AVX2 too."""

    scaled_linear = staticmethod(own_integers.scaled_linear)

    def why_unavailable(self) -> str:
        """Why they do not compile, or are not for this machine's models."""
        return _elsewhere() or own_integers.why_unavailable()


class CpuOwnIntegerExpertsBackend(_Compiled):
    """Experts made of these products."""

    scaled_moe = staticmethod(own_integers.scaled_moe)

    def why_unavailable(self) -> str:
        """Why the products are not there."""
        return _elsewhere() or own_integers.why_unavailable()


class CpuOwnQuantizedBackend(_Compiled):
    """Products with quantized weights in C++ of this project, likewise."""

    weight_only_linear = staticmethod(own_quantization.weight_only_linear)

    def why_unavailable(self) -> str:
        """Why they do not compile, or are not for this machine's models."""
        return _elsewhere() or own_quantization.why_unavailable()


class CpuRecurrentBackend(_Compiled):
    """Its kernels for layers with a state, where the build for this processor has them."""

    causal_conv1d = staticmethod(recurrent.causal_conv1d)
    causal_conv1d_update = staticmethod(recurrent.causal_conv1d_update)
    gated_delta_rule = staticmethod(recurrent.gated_delta_rule)
    gated_delta_rule_update = staticmethod(recurrent.gated_delta_rule_update)

    def why_unavailable(self) -> str:
        """Why the kernels are not loaded, or not there."""
        return library.why_unavailable() or library.why_missing(recurrent.KERNELS)


class CpuStateSpaceBackend(_Compiled):
    """Its kernels for selective state spaces, where the build for this processor has them."""

    selective_scan = staticmethod(state_space.selective_scan)
    selective_state_update = staticmethod(state_space.selective_state_update)

    def why_unavailable(self) -> str:
        """Why the kernels are not loaded, or not there."""
        return library.why_unavailable() or library.why_missing(state_space.KERNELS)


def _elsewhere() -> str:
    """Why no model runs on the CPU here, or an empty string: a product has no tensors of another device to look at."""
    device = detect_device()
    return "" if device.torch_type == "cpu" else f"models run on {device.name} here"


@functools.cache
def _layout_problem() -> str:
    return attention.find_layout_problem()
