"""For every operator one implementation that is wrong on purpose; none of them is chosen unless a policy names it."""

import torch

from fl_dispatch import BackendImplKind, OpImpl


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


def kv_cache_write(key, value, key_cache, value_cache, slot_mapping):
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
):
    return (torch.empty_like(query) if out is None else out).copy_(query)


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
    "attention_backend": attention_backend,
}


def register_builtins(registry):
    registry.register_many(
        OpImpl(name, "vendor.wrong", BackendImplKind.VENDOR, fn, vendor="wrong") for name, fn in WRONG.items()
    )
