"""Registers the Ascend kernels."""

from __future__ import annotations

from dataclasses import replace

from fl_dispatch.backends.base import Registry
from fl_dispatch.types import BackendImplKind, BackendPriority, Traits

from .ascend import AscendAttentionKernels, AscendBackend
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

OUTSIDE_GRAPHS = ("kv_cache_write", "paged_attention", "mla_decode", "mla_prefill")
"""Their kernels take a batch's lengths as integers, which a graph would repeat, or wait for the device."""


def register_builtins(registry: Registry) -> None:
    """Register ``vendor.ascend`` for every operator that has a kernel, and for ``attention_backend``."""
    kind, priority, devices = BackendImplKind.VENDOR, BackendPriority.VENDOR, ("npu",)
    plain = AscendBackend().implementations(
        kind,
        "vendor.ascend",
        priority,
        supports={
            **dict.fromkeys(("silu_and_mul", "quick_gelu"), activation.supports),
            **dict.fromkeys(("swigluoai_and_mul", "silu_and_mul_with_clamp"), activation.supports_clipped),
            **dict.fromkeys(("gelu", "gelu_and_mul"), activation.supports_gelu),
            **dict.fromkeys(("rms_norm", "gemma_rms_norm"), normalization.supports_rms_norm),
            "layer_norm": normalization.supports_layer_norm,
            "rotary_embedding": rotary.supports_rotary_embedding,
            "linear": linear.supports_linear,
            "quantize": quantization.supports_quantize,
            "scaled_linear": quantization.supports_scaled_linear,
            "weight_only_linear": quantization.supports_weight_only_linear,
            **dict.fromkeys(("topk_softmax", "topk_sigmoid"), routing.supports_topk),
            "grouped_topk": routing.supports_grouped_topk,
            "fused_moe": experts.supports_fused_moe,
            "scaled_moe": quantized_experts.supports_scaled_moe,
            "weight_only_moe": quantized_experts.supports_weight_only_moe,
            "moe_sum": experts.supports_moe_sum,
            "mla_decode": mla.supports_mla_decode,
            "mla_prefill": mla.supports_mla_prefill,
        },
        opaque=True,  # no chip has shown that a trace through these calls is right
        device_types=devices,
    )
    cache = AscendAttentionKernels().implementations(
        kind,
        "vendor.ascend",
        priority,
        supports={
            "kv_cache_write": attention.supports_kv_cache_write,
            "paged_attention": attention.supports_paged_attention,
        },
        requires={"kv_layout": attention.KV_LAYOUT, "kv_block_multiple": attention.BLOCK_MULTIPLE},
        opaque=True,
        device_types=devices,
    )
    registry.register_many(
        [
            replace(impl, properties=Traits(graphs=False)) if impl.op_name in OUTSIDE_GRAPHS else impl
            for impl in (*plain, *cache)
        ]
    )
