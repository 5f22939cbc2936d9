"""The attention class translates vLLM's arguments for the two operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_fl.attention import AttentionFLBackend, AttentionFLImpl, AttentionFLMetadata, attention_backend

BLOCKS, HEADS, SLOTS, DIMS = 6, 2, 4, 8


def cache() -> torch.Tensor:
    """What vLLM hands over: logical order blocks, heads, slots, dimensions; in memory slots come before heads."""
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


def test_without_a_cache_the_output_is_zero() -> None:
    output = torch.ones(2, 4, DIMS)
    implementation().forward(None, torch.ones(2, 4, DIMS), None, None, torch.empty(0), None, output)
    assert output.count_nonzero() == 0


def test_everything_the_model_asks_for_reaches_the_operator() -> None:
    sinks = torch.ones(4)
    layer = implementation(alibi_slopes=[1.0, 0.5, 0.25, 0.125], sliding_window=3, logits_soft_cap=30.0, sinks=sinks)
    seen: list[Any] = []

    def attend(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.extend(rest)
        return rest[8]

    layer.fl_attend = attend
    layer.forward(None, torch.ones(2, 4, DIMS), None, None, cache(), batch(2), torch.ones(2, 4, DIMS))
    scale, _, causal, window, softcap, alibi, given = seen[7:]
    assert (scale, causal, window, softcap) == (0.5, True, 3, 30.0)
    assert alibi.tolist() == [1.0, 0.5, 0.25, 0.125]
    assert given is sinks


def test_the_default_class_is_ours_and_has_no_mla() -> None:
    assert attention_backend().endswith(AttentionFLBackend.__name__)
    with pytest.raises(NotImplementedError, match="MLA"):
        attention_backend(use_mla=True)


def test_both_interfaces_describe_one_layout() -> None:
    shape = AttentionFLBackend.get_kv_cache_shape(BLOCKS, SLOTS, HEADS, DIMS)
    order = AttentionFLBackend.get_kv_cache_stride_order()
    assert shape == tuple(cache().shape)
    (layout,) = AttentionFLBackend.supported_kv_cache_layouts()
    assert layout.layer_view_order == order
