"""Attention that compares what the host says of a batch with its tensors, and calls the reference."""

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.backends.reference.impl import attention


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
    query_start_loc_host=None,
    seq_lens_host=None,
):
    given, held = (query_start_loc_host, seq_lens_host), (query_start_loc.tolist(), seq_lens.tolist())
    if given != held:
        raise AssertionError(f"the host's lengths are {given}, the tensors hold {held}")
    operands = (query, key_cache, value_cache, block_table, query_start_loc, seq_lens, max_query_len, max_seq_len)
    return attention.paged_attention(*operands, scale, out, causal, sliding_window, softcap, alibi_slopes, sinks)


def kv_cache_write(key, value, key_cache, value_cache, slot_mapping, may_skip=None):
    if (may_skip is False) is bool((slot_mapping < 0).any()):
        raise AssertionError(f"may_skip is {may_skip}, the slots are {slot_mapping.tolist()}")
    attention.kv_cache_write(key, value, key_cache, value_cache, slot_mapping)


def register_builtins(registry):
    for function in (paged_attention, kv_cache_write):
        impl = OpImpl(function.__name__, "vendor.hinted", BackendImplKind.VENDOR, function, vendor="hinted")
        registry.register_impl(impl)
