"""The Ascend backend, in two parts: attention, which needs a KV cache in the layout of its kernels, and the rest.

Some operators have no kernel here, because ``torch_npu`` has none with their meaning: ``mul_and_silu``,
``fatrelu_and_mul``, ``swiglustep_and_mul``, ``situ_and_mul``, ``gelu_and_mul_sparse``, ``relu2``, ``xielu`` and
``moe_align_block_size``. docs/evidence/ascend.md has the calls of the others, what they decline and what no chip has
shown yet.
"""

from __future__ import annotations

import importlib.util

from fl_dispatch.backends.base import Backend
from fl_dispatch.devices import ASCEND, detect_device

from .impl import (
    activation,
    attention,
    experts,
    linear,
    mla,
    normalization,
    quantization,
    quantized_experts,
    rotary,
    routing,
)


class _Kernels(Backend):
    """Name, vendor and availability, which both parts share."""

    @property
    def name(self) -> str:
        """``ascend``."""
        return "ascend"

    @property
    def vendor(self) -> str:
        """``ascend``."""
        return "ascend"

    def is_available(self) -> bool:
        """Whether PyTorch has an NPU to offer, which is asked without a device context."""
        return not self.why_unavailable()

    def why_unavailable(self) -> str:
        """Why it has none."""
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        device = detect_device()
        if device.torch_type == ASCEND.torch_type and device.vendor != self.vendor:
            return f"the NPU is the device '{device.name}', which runs the implementations of '{device.vendor}'"
        return "" if ASCEND.detect() else "no Ascend NPU that PyTorch can use"


class AscendBackend(_Kernels):
    """The operators that ask nothing of the KV cache."""

    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_and_mul = staticmethod(activation.gelu_and_mul)
    swigluoai_and_mul = staticmethod(activation.swigluoai_and_mul)
    silu_and_mul_with_clamp = staticmethod(activation.silu_and_mul_with_clamp)
    gelu = staticmethod(activation.gelu)
    quick_gelu = staticmethod(activation.quick_gelu)
    rms_norm = staticmethod(normalization.rms_norm)
    gemma_rms_norm = staticmethod(normalization.gemma_rms_norm)
    layer_norm = staticmethod(normalization.layer_norm)
    rotary_embedding = staticmethod(rotary.rotary_embedding)
    linear = staticmethod(linear.linear)
    quantize = staticmethod(quantization.quantize)
    scaled_linear = staticmethod(quantization.scaled_linear)
    weight_only_linear = staticmethod(quantization.weight_only_linear)
    topk_softmax = staticmethod(routing.topk_softmax)
    topk_sigmoid = staticmethod(routing.topk_sigmoid)
    grouped_topk = staticmethod(routing.grouped_topk)
    fused_moe = staticmethod(experts.fused_moe)
    scaled_moe = staticmethod(quantized_experts.scaled_moe)
    weight_only_moe = staticmethod(quantized_experts.weight_only_moe)
    moe_sum = staticmethod(experts.moe_sum)
    mla_decode = staticmethod(mla.mla_decode)
    mla_prefill = staticmethod(mla.mla_prefill)
    attention_backend = staticmethod(attention.attention_backend)


class AscendAttentionKernels(_Kernels):
    """Attention over a paged cache, and the cache's writes."""

    kv_cache_write = staticmethod(attention.kv_cache_write)
    paged_attention = staticmethod(attention.paged_attention)
