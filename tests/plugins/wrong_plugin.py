"""For every operator one implementation that is wrong on purpose; none of them is chosen unless a policy names it."""

import torch

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.backends.reference.impl import sparse_mla as reference


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return gate * up


def gelu_and_mul(x, approximate="none"):
    gate, up = x.chunk(2, dim=-1)
    return gate * up


def rms_norm(x, residual=None, weight=None, epsilon=1e-6):
    if residual is None:
        return torch.tanh(x)
    return torch.tanh(x + residual), x + residual


def rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    return query, key


def kv_cache_write(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_scale=None,
    value_scale=None,
    key_scales=None,
    value_scales=None,
):
    return None


def paged_attention(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start_loc,
    seq_lens,
    max_query_len,
    max_seq_len,
    scale,
    out=None,
    causal=True,
    sliding_window=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    key_scale=None,
    value_scale=None,
    key_scales=None,
    value_scales=None,
):
    return (torch.empty_like(query) if out is None else out).copy_(query)


def mla_decode(
    query,
    kv_cache,
    block_table,
    query_start_loc,
    seq_lens,
    max_query_len,
    max_seq_len,
    scale,
    kv_lora_rank,
    out=None,
    causal=True,
    cache_scale=None,
    query_rope=None,
):
    return query[..., :kv_lora_rank].contiguous()


def mla_prefill(
    query, key, value, query_start_loc, key_start_loc, max_query_len, max_key_len, scale, out=None, causal=True
):
    result = query[..., : value.shape[-1]].contiguous()
    return (result if out is None else out.copy_(result)), query.new_zeros(query.shape[1], query.shape[0])


def index_key_write(key, key_cache, slot_mapping, key_scales=None):
    """Every key is that of the token before."""
    reference.index_key_write(key.roll(1, 0), key_cache, slot_mapping, key_scales)


def index_topk(
    query,
    weights,
    key_cache,
    block_table,
    query_start_loc,
    seq_lens,
    max_query_len,
    max_seq_len,
    topk,
    out=None,
    key_scales=None,
):
    """Of the tokens that a full list should have, one is missed."""
    given = (query, weights, key_cache, block_table, query_start_loc, seq_lens, max_query_len, max_seq_len, topk)
    lists = reference.index_topk(*given, out, key_scales)
    lists[:, topk - 1] = -1
    return lists


def mla_sparse(
    query,
    kv_cache,
    positions,
    block_table,
    query_start_loc,
    max_query_len,
    scale,
    kv_lora_rank,
    out=None,
    cache_scale=None,
    query_rope=None,
):
    return query[..., :kv_lora_rank].contiguous()


def rms_norm_gated(x, gate, weight=None, epsilon=1e-6, activation="silu", group_size=0, norm_first=True):
    return torch.tanh(x)


def causal_conv1d(x, weight, bias, states, state_indices, query_start_loc, has_state=None, activation="silu"):
    return x.contiguous()


def causal_conv1d_update(x, weight, bias, states, state_indices, activation="silu"):
    return x.contiguous()


def gated_delta_rule(
    query, key, value, a, b, a_log, dt_bias, states, state_indices, query_start_loc, has_state=None, scale=1.0
):
    return value.contiguous()


def gated_delta_rule_update(query, key, value, a, b, a_log, dt_bias, states, state_indices, scale=1.0):
    return value.contiguous()


def selective_scan(x, dt, a, b, c, d, dt_bias, states, state_indices, query_start_loc, has_state=None):
    return x.contiguous()


def selective_state_update(x, dt, a, b, c, d, dt_bias, states, state_indices):
    return x.contiguous()


def first_experts(router_logits, topk):
    shape = (router_logits.shape[0], topk)
    weights = torch.full(shape, 1 / topk, device=router_logits.device)
    return weights, torch.arange(topk, dtype=torch.int32, device=router_logits.device).expand(shape).contiguous()


def topk(router_logits, topk, renormalize=False, bias=None):
    return first_experts(router_logits, topk)


def grouped_topk(
    router_logits,
    topk,
    num_expert_group,
    topk_group,
    renormalize=False,
    scoring_func="softmax",
    routed_scaling_factor=1.0,
    bias=None,
):
    return first_experts(router_logits, topk)


def fused_moe(
    hidden_states,
    w13,
    w2,
    topk_weights,
    topk_ids,
    activation="silu",
    apply_router_weight_on_input=False,
    expert_map=None,
    w13_bias=None,
    w2_bias=None,
    out=None,
):
    return (torch.empty_like(hidden_states) if out is None else out).copy_(hidden_states)


def quantize(x, dtype, group_size=0, scale=None):
    groups = -(-x.shape[-1] // group_size) if group_size > 0 else 1
    return torch.sign(x).to(getattr(torch, dtype)), x.new_ones((*x.shape[:-1], groups), dtype=torch.float32)


def rms_norm_quantize(x, dtype, residual=None, weight=None, epsilon=1e-6, group_size=0, scale=None):
    found = quantize(x, dtype, group_size)
    return found if residual is None else (x + residual, *found)


def silu_and_mul_quantize(x, dtype, group_size=0, scale=None):
    return quantize(silu_and_mul(x), dtype, group_size)


def rotary_embedding_kv_cache_write(
    query,
    key,
    value,
    cos,
    sin,
    position_ids,
    key_cache,
    value_cache,
    slot_mapping,
    rotary_interleaved=False,
    key_scale=None,
    value_scale=None,
):
    return query.clone(memory_format=torch.contiguous_format), key.clone(memory_format=torch.contiguous_format)


def scaled_linear(x, x_scale, weight, weight_scale, bias=None, dtype="bfloat16", block_size=0):
    return torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=getattr(torch, dtype), device=x.device)


def weight_only_linear(x, weight, scale, zero=None, bias=None):
    return x.new_zeros((*x.shape[:-1], weight.shape[0]))


def scaled_moe(
    hidden_states,
    w13,
    w13_scale,
    w2,
    w2_scale,
    topk_weights,
    topk_ids,
    activation="silu",
    apply_router_weight_on_input=False,
    expert_map=None,
    w13_bias=None,
    w2_bias=None,
    x13_scale=None,
    x2_scale=None,
    block_size=0,
    out=None,
):
    return (torch.empty_like(hidden_states) if out is None else out).copy_(hidden_states)


def weight_only_moe(
    hidden_states,
    w13,
    w13_scale,
    w2,
    w2_scale,
    topk_weights,
    topk_ids,
    activation="silu",
    apply_router_weight_on_input=False,
    expert_map=None,
    w13_bias=None,
    w2_bias=None,
    w13_zero=None,
    w2_zero=None,
    out=None,
):
    return (torch.empty_like(hidden_states) if out is None else out).copy_(hidden_states)


def fused_linear(
    x, weight, scale=None, zero=None, bias=None, norm_weight=None, residual=None, epsilon=1e-6, gated=False
):
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    total = x.new_empty(0) if residual is None else x + residual
    return x.new_ones(*x.shape[:-1], columns), total


def lora_shrink(x, out, down, adapters, order, starts, active, scale=1.0, down_2=None, down_3=None):
    return out.copy_(torch.ones_like(out))


def lora_expand(y, products, up, adapters, order, starts, active, offset=0, up_2=None, up_3=None):
    return y.add_((adapters >= 0)[:, None])


def attention_backend(use_mla=False):
    return "wrong_attention.ForgetfulBackend"


WRONG = {
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "rms_norm": rms_norm,
    "gemma_rms_norm": rms_norm,
    "rotary_embedding": rotary_embedding,
    "kv_cache_write": kv_cache_write,
    "paged_attention": paged_attention,
    "rms_norm_gated": rms_norm_gated,
    "causal_conv1d": causal_conv1d,
    "causal_conv1d_update": causal_conv1d_update,
    "gated_delta_rule": gated_delta_rule,
    "gated_delta_rule_update": gated_delta_rule_update,
    "selective_scan": selective_scan,
    "selective_state_update": selective_state_update,
    "mla_decode": mla_decode,
    "mla_prefill": mla_prefill,
    "index_key_write": index_key_write,
    "index_topk": index_topk,
    "mla_sparse": mla_sparse,
    "attention_backend": attention_backend,
    "topk_softmax": topk,
    "topk_sigmoid": topk,
    "grouped_topk": grouped_topk,
    "fused_moe": fused_moe,
    "lora_shrink": lora_shrink,
    "lora_expand": lora_expand,
    "quantize": quantize,
    "rms_norm_quantize": rms_norm_quantize,
    "silu_and_mul_quantize": silu_and_mul_quantize,
    "rotary_embedding_kv_cache_write": rotary_embedding_kv_cache_write,
    "scaled_linear": scaled_linear,
    "weight_only_linear": weight_only_linear,
    "fused_linear": fused_linear,
    "scaled_moe": scaled_moe,
    "weight_only_moe": weight_only_moe,
}


def register_builtins(registry):
    registry.register_many(
        OpImpl(name, "vendor.wrong", BackendImplKind.VENDOR, fn, vendor="wrong") for name, fn in WRONG.items()
    )
