"""Register the Ascend kernels, and ``attention_backend``.

Some operators have no kernel here, because ``torch_npu`` has no operator with their semantics: ``mul_and_silu``,
``fatrelu_and_mul``, ``swiglustep_and_mul``, ``situ_and_mul``, ``gelu_and_mul_sparse``, ``relu2``, ``xielu`` and
``moe_align_block_size``. docs/evidence/ascend.md lists the calls of the other operators, the arguments that they
decline, and the behaviour that was not yet seen on a chip.
"""

from __future__ import annotations

from functools import partial

from fl_dispatch.backends.base import Registry
from fl_dispatch.backends.rows import Row, implementations
from fl_dispatch.types import BackendImplKind, BackendPriority, Traits

from . import library

Kernel = partial(
    Row,
    impl_id="vendor.ascend",
    kind=BackendImplKind.VENDOR,
    vendor=library.VENDOR,
    priority=BackendPriority.VENDOR,
    needs=(library.why_unavailable,),
    opaque=True,  # tracing through these calls was not tested on a chip
    device_types=("npu",),
)
OutsideGraphs = partial(Kernel, traits=Traits(graphs=False))
"""Kernels that stay out of graphs: a graph would repeat the batch lengths that they take as integers, or they wait for
the device, or they were not tested in a graph yet.
"""

ROWS = (
    Kernel("silu_and_mul", "activation", supports="supports"),
    Kernel("gelu_and_mul", "activation", supports="supports_gelu"),
    Kernel("swigluoai_and_mul", "activation", supports="supports_clipped"),
    Kernel("silu_and_mul_with_clamp", "activation", supports="supports_clipped"),
    Kernel("gelu", "activation", supports="supports_gelu"),
    Kernel("quick_gelu", "activation", supports="supports"),
    Kernel("rms_norm", "normalization", supports="supports_rms_norm"),
    Kernel("gemma_rms_norm", "normalization", supports="supports_rms_norm"),
    Kernel("layer_norm", "normalization", supports="supports_layer_norm"),
    Kernel("rotary_embedding", "rotary", supports="supports_rotary_embedding"),
    Kernel("linear", "linear", supports="supports_linear"),
    Kernel("quantize", "quantization", supports="supports_quantize"),
    Kernel("scaled_linear", "quantization", supports="supports_scaled_linear"),
    Kernel("weight_only_linear", "quantization", supports="supports_weight_only_linear"),
    Kernel("topk_softmax", "routing", supports="supports_topk"),
    Kernel("topk_sigmoid", "routing", supports="supports_topk"),
    Kernel("grouped_topk", "routing", supports="supports_grouped_topk"),
    Kernel("fused_moe", "experts", supports="supports_fused_moe"),
    Kernel("scaled_moe", "quantized_experts", supports="supports_scaled_moe"),
    Kernel("weight_only_moe", "quantized_experts", supports="supports_weight_only_moe"),
    Kernel("moe_sum", "experts", supports="supports_moe_sum"),
    OutsideGraphs("mla_decode", "mla", supports="supports_mla_decode"),
    OutsideGraphs("mla_prefill", "mla", supports="supports_mla_prefill"),
    OutsideGraphs("index_key_write", "sparse_latent", supports="supports_index_key_write"),
    OutsideGraphs("index_topk", "sparse_latent", supports="supports_index_topk"),
    OutsideGraphs("mla_sparse", "sparse_latent", supports="supports_mla_sparse"),
    Kernel("attention_backend", "attention"),
    OutsideGraphs("kv_cache_write", "attention", supports="supports_kv_cache_write", requires="REQUIRES"),
    OutsideGraphs("paged_attention", "attention", supports="supports_paged_attention", requires="REQUIRES"),
)


def register_builtins(registry: Registry) -> None:
    """Register every row of the table."""
    registry.register_many(implementations(ROWS, __package__))
