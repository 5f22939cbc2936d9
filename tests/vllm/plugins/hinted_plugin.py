"""Attention that takes the batch's lengths as integers, compares them with the tensors, and calls the reference."""

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


def register_builtins(registry):
    kind = BackendImplKind.VENDOR
    registry.register_impl(OpImpl("paged_attention", "vendor.hinted", kind, paged_attention, vendor="hinted"))
