"""Registers the CPU kernels."""

from __future__ import annotations

from fl_dispatch.backends.base import Registry
from fl_dispatch.types import BackendImplKind, BackendPriority, Traits

from .cpu import (
    CpuAttentionBackend,
    CpuBackend,
    CpuExpertsBackend,
    CpuOwnBackend,
    CpuOwnExpertsBackend,
    CpuOwnIntegerExpertsBackend,
    CpuOwnIntegersBackend,
    CpuOwnQuantizedBackend,
    CpuProductsBackend,
    CpuRecurrentBackend,
    CpuStateSpaceBackend,
    OneDnnBackend,
)
from .impl import (
    activation,
    attention,
    experts,
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


def register_builtins(registry: Registry) -> None:
    """Register ``vendor.cpu`` for every operator that has a compiled kernel."""
    registry.register_many(
        [
            *CpuBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu",
                BackendPriority.VENDOR,
                supports={
                    "silu_and_mul": activation.supports_silu_and_mul,
                    "gelu_and_mul": activation.supports_gelu_and_mul,
                    "rms_norm": normalization.supports_rms_norm,
                    "rotary_embedding": rotary.supports_rotary_embedding,
                    "quantize": quantization.supports_quantize,
                },
                opaque=True,  # the compiled operators have no fake functions
                properties=Traits(inductor=False),
            ),
            *CpuProductsBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu",
                BackendPriority.VENDOR,
                opaque=False,  # an operator without results needs no fake function
            ),
            *CpuExpertsBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu",
                BackendPriority.VENDOR,
                supports={"fused_moe": experts.supports_fused_moe},
                opaque=True,
            ),
            *OneDnnBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu.onednn",
                BackendPriority.VENDOR - 5,  # the same kernels, and 10 us more in each call
                supports={
                    "scaled_linear": quantization.supports_scaled_linear,
                    "weight_only_linear": quantization.supports_weight_only_linear,
                },
                opaque=True,  # Inductor takes no weight in oneDNN's layout
            ),
            *CpuRecurrentBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu",
                BackendPriority.VENDOR,
                supports={
                    "causal_conv1d": recurrent.supports_causal_conv1d,
                    "causal_conv1d_update": recurrent.supports_causal_conv1d_update,
                    "gated_delta_rule": recurrent.supports_gated_delta_rule,
                    "gated_delta_rule_update": recurrent.supports_gated_delta_rule_update,
                },
                opaque=True,
            ),
            *CpuStateSpaceBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu",
                BackendPriority.VENDOR,
                supports={
                    "selective_scan": state_space.supports_selective_scan,
                    "selective_state_update": state_space.supports_selective_state_update,
                },
                opaque=True,
            ),
            *CpuAttentionBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu",
                BackendPriority.VENDOR,
                supports={
                    "kv_cache_write": attention.supports_kv_cache_write,
                    "paged_attention": attention.supports_paged_attention,
                },
                requires={"kv_layout": attention.KV_LAYOUT},
                properties=Traits(kv_block=32),  # smaller blocks run 16 keys at a time
                opaque=True,
            ),
            *CpuOwnBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu.cpp",
                BackendPriority.VENDOR - 5,
                supports={
                    "kv_cache_write": own_attention.supports_kv_cache_write,
                    "paged_attention": own_attention.supports_paged_attention,
                },
                properties=Traits(kv_layout=attention.KV_LAYOUT, kv_block=own_attention.STRIP, batch_invariant=True),
                opaque=True,
            ),
            *CpuOwnExpertsBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu.cpp",
                BackendPriority.VENDOR - 5,
                supports={"fused_moe": own_experts.supports_fused_moe},
                opaque=True,
            ),
            *CpuOwnIntegersBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu.cpp",
                BackendPriority.VENDOR - 6,  # after PyTorch's, where that one has instructions for them
                supports={"scaled_linear": own_integers.supports_scaled_linear},
                opaque=True,
            ),
            *CpuOwnIntegerExpertsBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu.cpp",
                BackendPriority.VENDOR - 6,
                supports={"scaled_moe": own_integers.supports_scaled_moe},
                properties=Traits(graphs=False),  # as the reference, which takes what it declines
                opaque=True,
            ),
            *CpuOwnQuantizedBackend().implementations(
                BackendImplKind.VENDOR,
                "vendor.cpu.cpp",
                BackendPriority.VENDOR - 6,
                supports={"weight_only_linear": own_quantization.supports_weight_only_linear},
                opaque=True,
            ),
        ]
    )
