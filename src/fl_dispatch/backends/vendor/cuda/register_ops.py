"""Registers the CUDA kernels."""

from __future__ import annotations

from fl_dispatch.backends.base import Registry
from fl_dispatch.types import BackendImplKind, BackendPriority, Traits

from .cuda import (
    CudaBackend,
    CudaExpertsBackend,
    CutlassBackend,
    CutlassBlocksBackend,
    DeepGemmBackend,
    FlashAttentionBackend,
    MacheteBackend,
    MarlinBackend,
    ScanBackend,
    SglangAttentionBackend,
    StateSpaceBackend,
)
from .impl import (
    activation,
    attention,
    deep_gemm,
    experts,
    normalization,
    quantization,
    rotary,
    state_space,
    weight_only,
)

ACTIVATIONS = (
    "silu_and_mul",
    "mul_and_silu",
    "fatrelu_and_mul",
    "swigluoai_and_mul",
    "silu_and_mul_with_clamp",
    "quick_gelu",
    "relu2",
)


def register_builtins(registry: Registry) -> None:
    """Register ``vendor.cuda`` for every operator that has a compiled kernel, and others by the names of theirs."""
    kind, priority, devices = BackendImplKind.VENDOR, BackendPriority.VENDOR, ("cuda",)
    registry.register_many(
        [
            *CudaBackend().implementations(
                kind,
                "vendor.cuda",
                priority,
                supports={
                    **dict.fromkeys(ACTIVATIONS, activation.supports),
                    "gelu_and_mul": activation.supports_gelu_and_mul,
                    "rms_norm": normalization.supports_rms_norm,
                    "rotary_embedding": rotary.supports_rotary_embedding,
                    "kv_cache_write": attention.supports_kv_cache_write,
                    "quantize": quantization.supports_quantize,
                },
                opaque=True,  # the compiled operators have no fake functions
                device_types=devices,
            ),
            *CudaExpertsBackend().implementations(
                kind,
                "vendor.cuda",
                priority,
                supports={
                    "topk_softmax": experts.supports_topk,
                    "topk_sigmoid": experts.supports_topk,
                    "moe_sum": experts.supports_moe_sum,
                },
                opaque=True,
                device_types=devices,
            ),
            *CutlassBackend().implementations(
                kind,
                "vendor.cuda.cutlass",
                priority,
                supports={"scaled_linear": quantization.supports_scaled_linear},
                opaque=True,
                device_types=devices,
            ),
            *CutlassBlocksBackend().implementations(
                kind,
                "vendor.cuda.cutlass.blocks",
                priority,
                supports={"scaled_linear": quantization.supports_scaled_blocks},
                opaque=True,
                device_types=devices,
            ),
            *DeepGemmBackend().implementations(
                kind,
                "vendor.cuda.deep_gemm",
                priority,
                supports={"scaled_linear": deep_gemm.supports},
                properties=Traits(only_by_name=True),  # it compiles kernels while requests wait
                opaque=True,
                device_types=devices,
            ),
            *MacheteBackend().implementations(
                kind,
                weight_only.MACHETE,
                priority + 1,  # where both run, vLLM takes it first
                supports={"weight_only_linear": weight_only.supports_machete},
                opaque=True,
                device_types=devices,
            ),
            *MarlinBackend().implementations(
                kind,
                weight_only.MARLIN,
                priority,
                supports={"weight_only_linear": weight_only.supports_marlin},
                opaque=True,
                device_types=devices,
            ),
            *ScanBackend().implementations(
                kind,
                "vendor.cuda",
                priority,
                supports={"selective_scan": state_space.supports_scan_of_columns},
                opaque=True,
                device_types=devices,
            ),
            *StateSpaceBackend().implementations(
                kind,
                "vendor.cuda.triton",
                priority,
                supports={
                    "selective_scan": state_space.supports_scan_of_heads,
                    "selective_state_update": state_space.supports_selective_state_update,
                },
                properties=Traits(chunk=state_space.CHUNK),
                opaque=True,
                device_types=devices,
            ),
            *FlashAttentionBackend().implementations(
                kind,
                "vendor.cuda.fa3",
                priority,
                supports={"paged_attention": attention.supports_paged_attention},
                opaque=True,
                device_types=devices,
            ),
            *SglangAttentionBackend().implementations(
                kind,
                "vendor.cuda.sglang_fa3",
                priority - 1,  # where both libraries are, vLLM's is what was measured
                supports={"paged_attention": attention.supports_sglang_paged_attention},
                opaque=True,
                device_types=devices,
            ),
        ]
    )
