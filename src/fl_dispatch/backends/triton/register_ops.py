"""Register the Triton kernels. To add one, write a function in ``impl``, named like its operator, and a row here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fl_dispatch.backends.base import Registry
from fl_dispatch.backends.rows import Row, absent, implementations
from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import interpreted, why_unavailable
from fl_dispatch.types import BackendImplKind, Traits

IMPL_ID = "default.triton"
INVARIANT_ID = "default.triton.invariant"
PRIORITY = 140
"""Below FlagGems, which has the default priority of its kind."""

Kernel = partial(
    Row, impl_id=IMPL_ID, kind=BackendImplKind.DEFAULT, priority=PRIORITY, needs=(why_unavailable,), opaque=True
)
"""A kernel that Dynamo does not trace; Inductor compiles around kernels that are not ``opaque``."""
SAME_ROWS = Traits(batch_invariant=True)
"""Traits of kernels with the same tiles in every batch."""
Invariant = partial(Kernel, impl_id=INVARIANT_ID, traits=Traits(batch_invariant=True, only_batch_invariant=True))
"""Batch-invariant forms of kernels with tiles that otherwise depend on the batch."""

ROWS = (
    Kernel("linear", "products.linear", traits="TRAITS"),
    Invariant("linear", "invariant"),
    Kernel("lora_shrink", "products.lora"),
    Kernel("lora_expand", "products.lora"),
    Kernel("quantize", "rows.quantization", supports="supports"),
    Kernel("rms_norm_quantize", "fusion.quantized_rows", supports="supports"),
    Kernel("silu_and_mul_quantize", "fusion.quantized_rows", supports="supports"),
    Kernel("scaled_linear", "products.scaled_linear", supports="supports"),
    Kernel("weight_only_linear", "products.weight_only_linear", supports="supports"),
    Kernel("fused_linear", "fusion.fused_linear", supports="supports"),
    Kernel("silu_and_mul", "rows.activation", opaque=False, traits=SAME_ROWS),
    Kernel("gelu_and_mul", "rows.activation", opaque=False, traits=SAME_ROWS),
    Kernel("rms_norm", "rows.normalization", opaque=False, traits=SAME_ROWS),
    Kernel("gemma_rms_norm", "rows.normalization", opaque=False, traits=SAME_ROWS),
    Kernel("rms_norm_gated", "rows.gated_norm", opaque=False),
    Kernel("rotary_embedding", "rows.rotary", opaque=False, traits=SAME_ROWS),
    Kernel("topk_softmax", "experts.routing", opaque=False),
    Invariant("topk_softmax", "invariant", opaque=False),
    Kernel("topk_sigmoid", "experts.routing", opaque=False),
    Invariant("topk_sigmoid", "invariant", opaque=False),
    Kernel("grouped_topk", "experts.routing", opaque=False),
    Invariant("grouped_topk", "invariant", opaque=False),
    Kernel("moe_align_block_size", "experts.alignment"),
    Kernel("moe_sum", "experts.fused_moe", opaque=False),
    Kernel("fused_moe", "experts.fused_moe"),
    Invariant("fused_moe", "invariant"),
    Kernel("scaled_moe", "experts.quantized_moe", supports="supports_scaled"),
    Kernel("weight_only_moe", "experts.quantized_moe", supports="supports_packed"),
    Kernel("kv_cache_write", "attention.cache", traits=SAME_ROWS),
    Kernel("rotary_embedding_kv_cache_write", "fusion.rotary_cache", traits=SAME_ROWS),
    Kernel("paged_attention", "attention.paged"),
    Invariant("paged_attention", "invariant"),
    Kernel("mla_decode", "attention.latent_decode"),
    Kernel("mla_prefill", "attention.latent_prefill"),
    Kernel("index_key_write", "attention.index_cache", supports="supports"),
    Kernel("index_topk", "attention.index_topk", supports="supports"),
    Kernel("mla_sparse", "attention.sparse_latent"),
    Kernel("causal_conv1d", "states.convolution"),
    Kernel("causal_conv1d_update", "states.convolution"),
    Kernel("gated_delta_rule", "states.delta_rule"),
    Kernel("gated_delta_rule_update", "states.delta_rule"),
    Kernel("selective_scan", "states.state_space"),
    Kernel("selective_state_update", "states.state_space"),
)


def register_builtins(registry: Registry) -> None:
    """Register every row of the table; modules are imported only if Triton can run."""
    if why_unavailable():
        registry.register_many(absent(ROWS))
        return
    # A launch on host memory declines, so a call need not check the device of its tensors.
    devices = None if interpreted() else (detect_device().torch_type,)
    registry.register_many(implementations([replace(row, device_types=devices) for row in ROWS], __package__))
