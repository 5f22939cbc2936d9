"""For every operator one implementation that is wrong on purpose; none of them is chosen unless a policy names it.

A function takes those parameters of its operators that it looks at.
"""

import inspect

import torch

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.backends.reference.impl import sparse_mla as reference
from fl_dispatch.ops import OPERATORS

WRONG = {}
"""Operator → the implementation, which takes all parameters but hints."""


def wrong(*operators):
    """Enter a function for operators."""

    def enter(function):
        WRONG.update({operator: _of_all_parameters(OPERATORS[operator], function) for operator in operators})
        return function

    return enter


def _of_all_parameters(operator, function):
    declared = [one for one in operator.signature.parameters.values() if one.name not in operator.hints]
    names, defaults = [one.name for one in declared], {one.name: one.default for one in declared}
    wanted = list(inspect.signature(function).parameters)

    def implementation(*args, **kwargs):
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        return function(*[given[name] for name in wanted])

    implementation.__signature__ = operator.signature.replace(parameters=declared)
    return implementation


def _into(out, values):
    return (torch.empty_like(values) if out is None else out).copy_(values)


@wrong("silu_and_mul", "gelu_and_mul")
def product_alone(x):
    gate, up = x.chunk(2, dim=-1)
    return gate * up


@wrong("rms_norm", "gemma_rms_norm")
def bounded(x, residual):
    if residual is None:
        return torch.tanh(x)
    return torch.tanh(x + residual), x + residual


@wrong("rotary_embedding")
def not_turned(query, key):
    return query, key


@wrong("kv_cache_write")
def nothing_written():
    return None


@wrong("paged_attention")
def query_itself(query, out):
    return _into(out, query)


@wrong("mla_decode", "mla_sparse")
def latent_query(query, kv_lora_rank):
    return query[..., :kv_lora_rank].contiguous()


@wrong("mla_prefill")
def part_of_query(query, value, out):
    result = query[..., : value.shape[-1]].contiguous()
    return (result if out is None else out.copy_(result)), query.new_zeros(query.shape[1], query.shape[0])


@wrong("index_key_write")
def keys_of_tokens_before(key, key_cache, slot_mapping, key_scales):
    reference.index_key_write(key.roll(1, 0), key_cache, slot_mapping, key_scales)


@wrong("index_topk")
def one_token_missed(
    query,
    weights,
    key_cache,
    block_table,
    query_start_loc,
    seq_lens,
    max_query_len,
    max_seq_len,
    topk,
    out,
    key_scales,
):
    """The last token of a full list is missed."""
    given = (query, weights, key_cache, block_table, query_start_loc, seq_lens, max_query_len, max_seq_len, topk)
    lists = reference.index_topk(*given, out, key_scales)
    lists[:, topk - 1] = -1
    return lists


@wrong("rms_norm_gated")
def bounded_alone(x):
    return torch.tanh(x)


@wrong("causal_conv1d", "causal_conv1d_update", "selective_scan", "selective_state_update")
def without_state(x):
    return x.contiguous()


@wrong("gated_delta_rule", "gated_delta_rule_update")
def values_alone(value):
    return value.contiguous()


@wrong("topk_softmax", "topk_sigmoid", "grouped_topk")
def first_experts(router_logits, topk):
    shape = (router_logits.shape[0], topk)
    weights = torch.full(shape, 1 / topk, device=router_logits.device)
    return weights, torch.arange(topk, dtype=torch.int32, device=router_logits.device).expand(shape).contiguous()


@wrong("fused_moe", "scaled_moe", "weight_only_moe")
def tokens_themselves(hidden_states, out):
    return _into(out, hidden_states)


@wrong("quantize")
def signs(x, dtype, group_size):
    groups = -(-x.shape[-1] // group_size) if group_size > 0 else 1
    return torch.sign(x).to(getattr(torch, dtype)), x.new_ones((*x.shape[:-1], groups), dtype=torch.float32)


@wrong("rms_norm_quantize")
def signs_without_norm(x, dtype, residual, group_size):
    found = signs(x, dtype, group_size)
    return found if residual is None else (x + residual, *found)


@wrong("silu_and_mul_quantize")
def signs_of_product(x, dtype, group_size):
    return signs(product_alone(x), dtype, group_size)


@wrong("rotary_embedding_kv_cache_write")
def neither(query, key):
    return query.clone(memory_format=torch.contiguous_format), key.clone(memory_format=torch.contiguous_format)


@wrong("scaled_linear")
def zeros_of_type(x, weight, dtype):
    return torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=getattr(torch, dtype), device=x.device)


@wrong("weight_only_linear")
def zeros(x, weight):
    return x.new_zeros((*x.shape[:-1], weight.shape[0]))


@wrong("fused_linear")
def ones(x, weight, residual, gated):
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    total = x.new_empty(0) if residual is None else x + residual
    return x.new_ones(*x.shape[:-1], columns), total


@wrong("lora_shrink")
def ones_of_adapters(out):
    return out.copy_(torch.ones_like(out))


@wrong("lora_expand")
def one_more(y, adapters):
    return y.add_((adapters >= 0)[:, None])


@wrong("attention_backend")
def forgetful():
    return "wrong_attention.ForgetfulBackend"


def register_builtins(registry):
    registry.register_many(
        OpImpl(name, "vendor.wrong", BackendImplKind.VENDOR, fn, vendor="wrong") for name, fn in WRONG.items()
    )
