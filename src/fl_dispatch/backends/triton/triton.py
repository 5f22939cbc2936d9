"""The Triton backend: every operator as a kernel of our own. Importing it imports Triton."""

from __future__ import annotations

from fl_dispatch.backends.base import Backend

from .impl import (
    activation,
    alignment,
    attention,
    cache,
    convolution,
    delta_rule,
    gated_norm,
    joined,
    linear,
    lora,
    mla,
    moe,
    normalization,
    quantize,
    quantized_moe,
    rotary,
    rotary_cache,
    routing,
    scaled,
    state_space,
    weight_only,
)


class TritonBackend(Backend):
    """Hardware-neutral kernels in plain Triton."""

    linear = staticmethod(linear.linear)
    lora_shrink = staticmethod(lora.lora_shrink)
    lora_expand = staticmethod(lora.lora_expand)
    quantize = staticmethod(quantize.quantize)
    rms_norm_quantize = staticmethod(joined.rms_norm_quantize)
    silu_and_mul_quantize = staticmethod(joined.silu_and_mul_quantize)
    scaled_linear = staticmethod(scaled.scaled_linear)
    weight_only_linear = staticmethod(weight_only.weight_only_linear)
    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_and_mul = staticmethod(activation.gelu_and_mul)
    rms_norm = staticmethod(normalization.rms_norm)
    gemma_rms_norm = staticmethod(normalization.gemma_rms_norm)
    rms_norm_gated = staticmethod(gated_norm.rms_norm_gated)
    rotary_embedding = staticmethod(rotary.rotary_embedding)
    topk_softmax = staticmethod(routing.topk_softmax)
    topk_sigmoid = staticmethod(routing.topk_sigmoid)
    grouped_topk = staticmethod(routing.grouped_topk)
    moe_align_block_size = staticmethod(alignment.moe_align_block_size)
    moe_sum = staticmethod(moe.moe_sum)
    fused_moe = staticmethod(moe.fused_moe)
    scaled_moe = staticmethod(quantized_moe.scaled_moe)
    weight_only_moe = staticmethod(quantized_moe.weight_only_moe)
    kv_cache_write = staticmethod(cache.kv_cache_write)
    rotary_embedding_kv_cache_write = staticmethod(rotary_cache.rotary_embedding_kv_cache_write)
    paged_attention = staticmethod(attention.paged_attention)
    mla_decode = staticmethod(mla.mla_decode)
    mla_prefill = staticmethod(mla.mla_prefill)
    causal_conv1d = staticmethod(convolution.causal_conv1d)
    causal_conv1d_update = staticmethod(convolution.causal_conv1d_update)
    gated_delta_rule = staticmethod(delta_rule.gated_delta_rule)
    gated_delta_rule_update = staticmethod(delta_rule.gated_delta_rule_update)
    selective_scan = staticmethod(state_space.selective_scan)
    selective_state_update = staticmethod(state_space.selective_state_update)

    @property
    def name(self) -> str:
        """``triton``."""
        return "triton"
