"""The reference backend."""

from __future__ import annotations

from fl_dispatch.backends.base import Backend

from .impl import (
    activation,
    attention,
    fused_linear,
    joined,
    linear,
    lora,
    mla,
    moe,
    normalization,
    quantization,
    recurrent,
    rotary,
    routing,
    state_space,
)


class ReferenceBackend(Backend):
    """Every declared operator in plain PyTorch. Half types are computed in float32; float32 and float64 stay."""

    linear = staticmethod(linear.linear)
    lora_shrink = staticmethod(lora.lora_shrink)
    lora_expand = staticmethod(lora.lora_expand)
    quantize = staticmethod(quantization.quantize)
    scaled_linear = staticmethod(quantization.scaled_linear)
    weight_only_linear = staticmethod(quantization.weight_only_linear)
    rms_norm_quantize = staticmethod(joined.rms_norm_quantize)
    silu_and_mul_quantize = staticmethod(joined.silu_and_mul_quantize)
    rotary_embedding_kv_cache_write = staticmethod(joined.rotary_embedding_kv_cache_write)
    fused_linear = staticmethod(fused_linear.fused_linear)
    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_and_mul = staticmethod(activation.gelu_and_mul)
    mul_and_silu = staticmethod(activation.mul_and_silu)
    fatrelu_and_mul = staticmethod(activation.fatrelu_and_mul)
    swigluoai_and_mul = staticmethod(activation.swigluoai_and_mul)
    silu_and_mul_with_clamp = staticmethod(activation.silu_and_mul_with_clamp)
    swiglustep_and_mul = staticmethod(activation.swiglustep_and_mul)
    situ_and_mul = staticmethod(activation.situ_and_mul)
    gelu_and_mul_sparse = staticmethod(activation.gelu_and_mul_sparse)
    gelu = staticmethod(activation.gelu)
    quick_gelu = staticmethod(activation.quick_gelu)
    relu2 = staticmethod(activation.relu2)
    xielu = staticmethod(activation.xielu)
    rms_norm = staticmethod(normalization.rms_norm)
    gemma_rms_norm = staticmethod(normalization.gemma_rms_norm)
    rms_norm_gated = staticmethod(normalization.rms_norm_gated)
    layer_norm = staticmethod(normalization.layer_norm)
    rotary_embedding = staticmethod(rotary.rotary_embedding)
    kv_cache_write = staticmethod(attention.kv_cache_write)
    paged_attention = staticmethod(attention.paged_attention)
    mla_decode = staticmethod(mla.mla_decode)
    mla_prefill = staticmethod(mla.mla_prefill)
    causal_conv1d = staticmethod(recurrent.causal_conv1d)
    causal_conv1d_update = staticmethod(recurrent.causal_conv1d_update)
    gated_delta_rule = staticmethod(recurrent.gated_delta_rule)
    gated_delta_rule_update = staticmethod(recurrent.gated_delta_rule_update)
    selective_scan = staticmethod(state_space.selective_scan)
    selective_state_update = staticmethod(state_space.selective_state_update)
    topk_softmax = staticmethod(routing.topk_softmax)
    topk_sigmoid = staticmethod(routing.topk_sigmoid)
    grouped_topk = staticmethod(routing.grouped_topk)
    moe_align_block_size = staticmethod(moe.moe_align_block_size)
    moe_sum = staticmethod(moe.moe_sum)
    fused_moe = staticmethod(moe.fused_moe)
    scaled_moe = staticmethod(moe.scaled_moe)
    weight_only_moe = staticmethod(moe.weight_only_moe)

    @property
    def name(self) -> str:
        """``reference``."""
        return "reference"
