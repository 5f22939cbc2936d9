"""The attention class translates vLLM's arguments for the two operators."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from fl_dispatch.backends.flaggems.impl.custom_attention import attention_backend
from vllm_fl.attention.dense import AttentionFLBackend, AttentionFLImpl
from vllm_fl.attention.metadata import AttentionFLMetadata, _token_blocks

BLOCKS, HEADS, SLOTS, DIMS = 6, 2, 4, 8


def cache() -> torch.Tensor:
    """vLLM's cache: logical order blocks, heads, slots, dimensions; in memory slots come before heads."""
    return torch.zeros(BLOCKS, SLOTS, HEADS, 2 * DIMS).transpose(1, 2)


def implementation(**options: Any) -> AttentionFLImpl:
    return AttentionFLImpl(4, DIMS, 0.5, HEADS, **options)


def batch(tokens: int) -> AttentionFLMetadata:
    lengths = torch.tensor([tokens], dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    return AttentionFLMetadata(tokens, tokens, tokens, starts, lengths, torch.tensor([[3, 1]], dtype=torch.int32), True)


def test_written_keys_and_values_lie_in_vllms_tensor() -> None:
    kv_cache, key, value = cache(), torch.randn(3, HEADS, DIMS), torch.randn(3, HEADS, DIMS)
    implementation().do_kv_cache_update(None, key, value, kv_cache, torch.tensor([4, 5, -1]))
    assert torch.equal(kv_cache[1, :, :2, :DIMS].transpose(0, 1), key[:2])
    assert torch.equal(kv_cache[1, :, :2, DIMS:].transpose(0, 1), value[:2])
    assert kv_cache.count_nonzero() == 2 * 2 * HEADS * DIMS


def test_a_layer_that_shares_a_cache_writes_nothing() -> None:
    kv_cache = cache()
    shared = implementation(kv_sharing_target_layer_name="model.layers.0.self_attn.attn")
    shared.do_kv_cache_update(None, torch.ones(1, HEADS, DIMS), torch.ones(1, HEADS, DIMS), kv_cache, torch.tensor([4]))
    assert kv_cache.count_nonzero() == 0


def test_the_output_is_filled_and_padding_is_left_alone() -> None:
    kv_cache, query = cache(), torch.randn(7, 4, DIMS)
    layer = implementation()
    layer.do_kv_cache_update(
        None, torch.randn(7, HEADS, DIMS), torch.randn(7, HEADS, DIMS), kv_cache, torch.tensor([12, 13, 14, 15, 4])
    )
    output = torch.full((7, 4, DIMS), 9.0)
    assert layer.forward(None, query, None, None, kv_cache, batch(5), output) is output
    assert (output[5:] == 9.0).all()
    assert torch.equal(output[0, 0], kv_cache[3, 0, 0, DIMS:])  # the first token sees itself only


def test_an_encoder_layer_attends_over_the_batchs_own_tokens_and_writes_no_cache() -> None:
    lengths = [3, 1, 4]
    starts = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    common = SimpleNamespace(query_start_loc=starts, max_query_len=4, num_actual_tokens=8)
    table = _token_blocks(common)
    assert [row[:length].tolist() for row, length in zip(table, lengths, strict=True)] == [[0, 1, 2], [3], [4, 5, 6, 7]]
    metadata = AttentionFLMetadata(8, 4, 4, starts, torch.tensor(lengths, dtype=torch.int32), table, False)
    layer, nothing = implementation(attn_type="encoder_only"), torch.empty(0)
    query, key, value = torch.randn(9, 4, DIMS), torch.randn(9, HEADS, DIMS), torch.randn(9, HEADS, DIMS)
    layer.do_kv_cache_update(None, key, value, nothing, torch.zeros(9, dtype=torch.int64))
    output = layer.forward(None, query, key, value, nothing, metadata, torch.full((9, 4, DIMS), 9.0))
    for start, length in zip(starts.tolist(), lengths, strict=False):
        part = slice(start, start + length)
        each = (tensor[part].transpose(0, 1) for tensor in (query, key, value))
        expected = torch.nn.functional.scaled_dot_product_attention(*each, scale=0.5, enable_gqa=True)
        torch.testing.assert_close(output[part], expected.transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert (output[8:] == 9.0).all()


def test_without_a_cache_the_output_is_zero() -> None:
    output = torch.ones(2, 4, DIMS)
    implementation().forward(None, torch.ones(2, 4, DIMS), None, None, torch.empty(0), None, output)
    assert output.count_nonzero() == 0


def test_everything_the_model_asks_for_reaches_the_operator() -> None:
    sinks = torch.ones(4)
    layer = implementation(alibi_slopes=[1.0, 0.5, 0.25, 0.125], sliding_window=3, logits_soft_cap=30.0, sinks=sinks)
    seen: list[Any] = []

    def attend(query: torch.Tensor, *rest: Any, query_start_loc_host: Any, seq_lens_host: Any) -> torch.Tensor:
        seen.extend(rest)
        return rest[8]

    layer.fl_attend = attend
    layer.forward(None, torch.ones(2, 4, DIMS), None, None, cache(), batch(2), torch.ones(2, 4, DIMS))
    scale, _, causal, window, softcap, alibi, given, *_ = seen[7:]
    assert (scale, causal, window, softcap) == (0.5, True, 3, 30.0)
    assert alibi.tolist() == [1.0, 0.5, 0.25, 0.125]
    assert given is sinks


def test_the_default_classes_are_ours() -> None:
    from vllm_fl.attention.mla import MLAFLBackend

    for use_mla, expected in ((False, AttentionFLBackend), (True, MLAFLBackend)):
        module, _, name = attention_backend(use_mla).rpartition(".")
        assert getattr(importlib.import_module(module), name) is expected
