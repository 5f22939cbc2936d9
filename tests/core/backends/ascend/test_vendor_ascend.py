"""The Ascend backend's calls to ``torch_npu``: a stand-in notes the calls, and computes nothing.

``tests/npu`` has the genuine schemas and the results.
"""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import as_called
from fl_dispatch import call_op
from fl_dispatch.backends.vendor.ascend.impl import (
    attention,
    attention_mask,
    experts,
    linear,
    mla,
    normalization,
    quantization,
    quantized_experts,
    rotary,
    routing,
    sparse_latent,
)
from fl_dispatch.backends.vendor.ascend.register_ops import register_builtins
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops import OPERATORS
from fl_dispatch.types import OpImpl
from tensors import Largest

HALF = torch.float16
INT8, FP8, ONE = torch.int8, torch.float8_e4m3fn, torch.ones(1, 1)
BLOCK = 128
INDEX_DIM = sparse_latent.INDEX_DIM


class Calls:
    """A ``torch_npu`` whose functions note their arguments and return what was prepared for them."""

    def __init__(self) -> None:
        self.made: list[SimpleNamespace] = []
        self.results: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            self.made.append(SimpleNamespace(name=name, args=args, **kwargs))
            result = self.results[name]
            return result(*args, **kwargs) if callable(result) else result

        return function


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    calls.results = {
        "npu_fused_infer_attention_score": lambda query, *_, **__: (query, None),
        "npu_fused_infer_attention_score_v2": lambda query, key, value, **__: (
            query.new_ones(*query.shape[:2], value.shape[-1]),
            query.new_ones(*query.shape[:2], 1).float(),
        ),
        "npu_sparse_flash_attention": lambda query, *_, **__: (query, None, None),
        "npu_scatter_pa_kv_cache": None,
        "npu_scatter_nd_update_": None,
        "npu_rotary_mul": lambda x, *_: x + 1,
        "npu_add_rms_norm": lambda x, residual, *_: (x + 1, None, x + residual),
    }
    monkeypatch.setitem(sys.modules, "torch_npu", calls)
    return calls


def batch(starts: list[int], lengths: list[int], padding: int = 0, **options: Any) -> dict[str, Any]:
    """Arguments of ``paged_attention`` for requests that begin at these rows, over blocks of 128 tokens."""
    blocks = 1 + max(-(-length // BLOCK) for length in lengths)
    cache = torch.zeros(8, BLOCK, 2, 128, dtype=HALF)
    return {
        "query": torch.randn(starts[-1] + padding, 4, 128).to(HALF),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "block_table": torch.full((len(lengths), blocks), 3, dtype=torch.int32),
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "max_query_len": max(end - start for start, end in itertools.pairwise(starts)),
        "max_seq_len": max(lengths),
        "scale": 0.125,
        **options,
    }


def implementation(name: str) -> OpImpl:
    return as_called(register_builtins, name, "vendor.ascend")


def answer(name: str, **arguments: Any) -> bool | str:
    supports = implementation(name).supports
    assert supports is not None
    return supports(**arguments)


# -- attention --------------------------------------------------------------------------------------------------------


def test_query_lengths_are_cumulative_integers_and_key_lengths_are_not(npu: Calls) -> None:
    attention.paged_attention(**batch([0, 3, 4], [130, 9]))
    (call,) = npu.made
    assert (call.actual_seq_lengths, call.actual_seq_lengths_kv) == ([3, 4], [130, 9])
    assert {type(number) for number in (*call.actual_seq_lengths, *call.actual_seq_lengths_kv)} == {int}
    assert (call.input_layout, call.num_heads, call.num_key_value_heads, call.scale) == ("TND", 4, 2, 0.125)


def test_lengths_that_the_caller_knows_are_not_read_from_the_device(
    npu: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = batch([0, 3, 4], [130, 9])
    monkeypatch.setattr(Tensor, "tolist", lambda self: pytest.fail("the device was waited for"))
    attention.paged_attention(**arguments, query_start_loc_host=[0, 3, 4], seq_lens_host=[130, 9])
    assert npu.made[0].actual_seq_lengths == [3, 4]


def test_caches_go_as_contiguous_blocks_with_all_heads_in_a_row(npu: Calls) -> None:
    arguments = batch([0, 1], [5])
    attention.paged_attention(**arguments)
    (call,) = npu.made
    assert call.args[1].shape == call.args[2].shape == (8, BLOCK, 256)
    assert call.block_size == BLOCK
    assert call.args[1].data_ptr() == arguments["key_cache"].data_ptr()
    assert call.block_table.dtype is torch.int32
    assert call.block_table.is_contiguous()


def test_padding_requests_and_padding_rows_do_not_reach_the_kernel(npu: Calls) -> None:
    arguments = batch([0, 2, 3, 3, 3], [7, 4, 0, 0], padding=5)
    out = torch.full_like(arguments["query"], 9.0)
    assert attention.paged_attention(**arguments, out=out) is out
    (call,) = npu.made
    assert (call.actual_seq_lengths, call.actual_seq_lengths_kv) == ([2, 3], [7, 4])
    assert call.args[0].shape[0] == 3
    assert call.block_table.shape[0] == 2
    assert torch.equal(out[:3], arguments["query"][:3])
    assert (out[3:] == 9.0).all()


def test_a_batch_of_padding_alone_calls_nothing(npu: Calls) -> None:
    attention.paged_attention(**batch([0, 0], [1], padding=4))
    assert not npu.made


@pytest.mark.parametrize(
    ("options", "mode", "bounds"),
    [
        ({}, 3, None),
        ({"causal": False}, 0, None),
        ({"sliding_window": 48}, 4, (47, 0)),
        ({"sliding_window": 48, "causal": False}, 4, (47, 47)),
    ],
)
def test_what_a_query_sees_is_a_mode_of_the_kernel(
    npu: Calls, options: dict[str, Any], mode: int, bounds: tuple[int, int] | None
) -> None:
    attention.paged_attention(**batch([0, 3], [130], **options))
    (call,) = npu.made
    assert call.sparse_mode == mode
    assert (mode == 0) == (not hasattr(call, "atten_mask"))
    assert bounds is None or (call.pre_tokens, call.next_tokens) == bounds


def test_decoding_with_a_window_gives_each_query_twice_because_a_single_one_has_no_window(npu: Calls) -> None:
    arguments = batch([0, 1, 2], [130, 9], sliding_window=48)
    result = attention.paged_attention(**arguments)
    (call,) = npu.made
    assert call.actual_seq_lengths == [2, 4]
    assert call.args[0].shape[0] == 4
    assert torch.equal(result, arguments["query"])


def test_entries_of_the_table_that_a_window_has_left_name_blocks_of_the_cache(npu: Calls) -> None:
    arguments = batch([0, 3], [300], sliding_window=48)
    arguments["block_table"][0, 0], arguments["block_table"][0, 1] = -7, 1 << 20
    attention.paged_attention(**arguments)
    assert npu.made[0].block_table.tolist() == [[0, 7, 3, 3]]


def test_the_mask_hides_what_comes_later_and_is_made_once() -> None:
    mask = attention_mask.triangle(torch.device("cpu"))
    assert mask.shape == (2048, 2048)
    assert mask.dtype is torch.bool
    assert mask[5].tolist() == [False] * 6 + [True] * 2042
    assert attention_mask.triangle(torch.device("cpu")) is mask


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"query": torch.zeros(1, 4, 128)}, "query is float32; .* takes float16 or bfloat16"),
        ({"softcap": 30.0}, "a soft cap"),
        ({"alibi_slopes": torch.zeros(4)}, "ALiBi"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"key_cache": torch.zeros(8, 16, 2, 128, dtype=HALF)}, "block size 16"),
        ({"key_cache": torch.zeros(8, BLOCK, 2, 256, dtype=HALF)[..., :128]}, "not contiguous"),
        ({"value_cache": torch.zeros(8, BLOCK, 2, 32, dtype=HALF)}, "values have 32 elements"),
        ({"query": torch.zeros(1, 4, 64, dtype=HALF)}, "head size 64 is not one of 128, 192"),
    ],
)
def test_what_the_documentation_refuses_is_declined_with_a_reason(change: dict[str, Any], reason: str) -> None:
    import re

    assert answer("paged_attention", **batch([0, 1], [5])) is True
    assert re.search(reason, str(answer("paged_attention", **{**batch([0, 1], [5]), **change})))


def test_attention_needs_the_layout_and_the_blocks_of_its_kernels() -> None:
    for name in ("kv_cache_write", "paged_attention"):
        assert implementation(name).requires == {"kv_layout": "(NHD|NHD)", "kv_block_multiple": 128}


# -- the cache's writes -----------------------------------------------------------------------------------------------


def write(slots: list[int], **options: Any) -> None:
    rows = torch.arange(len(slots) + 2.0)[:, None, None].expand(-1, 2, 64).to(HALF)
    cache = torch.zeros(4, BLOCK, 2, 64, dtype=HALF)
    attention.kv_cache_write(rows, rows, cache, cache.clone(), torch.tensor(slots), **options)


def test_skipped_tokens_do_not_reach_the_kernel(npu: Calls) -> None:
    write([5, -1, 7])
    (call,) = npu.made
    key, value, _, _, slots = call.args
    assert slots.tolist() == [5, 7]
    assert key[:, 0, 0].tolist() == value[:, 0, 0].tolist() == [0.0, 2.0]
    assert key.is_contiguous()
    assert value.is_contiguous()
    assert call.cache_mode == "Norm"


def test_a_write_without_a_slot_calls_nothing(npu: Calls) -> None:
    write([-1, -1])
    assert not npu.made


def test_a_caller_who_knows_that_none_is_skipped_makes_nobody_wait(npu: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "nonzero", lambda self: pytest.fail("the device was waited for"))
    write([5, 6], may_skip=False)
    assert npu.made[0].args[4].tolist() == [5, 6]


def test_latent_rows_are_written_whole(npu: Calls) -> None:
    rows = torch.zeros(4, 16, 1, 576, dtype=HALF)
    key, value = torch.ones(2, 1, 512, dtype=HALF), torch.zeros(2, 1, 64, dtype=HALF)
    attention.kv_cache_write(key, value, rows[..., :512], rows[..., 512:], torch.tensor([3, 40]))
    (call,) = npu.made
    target, slots, new = call.args
    assert call.name == "npu_scatter_nd_update_"
    assert target.data_ptr() == rows.data_ptr()
    assert target.shape == (64, 576)
    assert slots.tolist() == [[3], [40]]
    assert new.shape == (2, 576)


# -- latent attention -------------------------------------------------------------------------------------------------


def test_a_latent_cache_in_fp8_is_declined() -> None:
    (sample,) = (
        each
        for each in OPERATORS["mla_decode"].samples(HALF, torch.device("cpu"), torch.Generator())
        if each.label == "fp8 cache, decode, 16 heads"
    )
    arguments = dict(zip(OPERATORS["mla_decode"].parameters, sample.args, strict=False))
    assert answer("mla_decode", **arguments) == "it does not take 'cache_scale'"
    plain = {**arguments, "kv_cache": arguments["kv_cache"].to(HALF), "cache_scale": None}
    assert answer("mla_decode", **plain) is True


def test_a_latent_batch_is_copied_in_two_parts_into_blocks_of_128(npu: Calls) -> None:
    cache = torch.arange(20.0)[:, None, None].expand(20, 16, 576).to(HALF)
    table = torch.tensor([[4, 5, 6] + [0] * 7, [9] + [-3] * 9], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([40, 3], dtype=torch.int32)
    query = torch.zeros(2, 8, 576, dtype=HALF)
    out = mla.mla_decode(query, cache, table, starts, lengths, 1, 40, 0.1, 512)
    (call,) = npu.made
    assert call.args[1].shape == (2, 128, 512)
    assert call.key_rope.shape == (2, 128, 64)
    assert call.args[1][:, :48:16, 0].tolist()[0] == [4.0, 5.0, 6.0]
    assert call.args[1][1, 0, 0] == 9.0
    assert call.block_table.tolist() == [[0], [1]]
    assert call.actual_seq_kvlen == [40, 3]
    assert call.sparse_mode == 0
    assert call.atten_mask is None
    assert out.shape == (2, 8, 512)


def test_a_query_in_two_parts_goes_to_the_kernel_as_it_is(npu: Calls) -> None:
    cache, table = torch.zeros(2, 128, 576, dtype=HALF), torch.tensor([[1]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    query, rope = torch.ones(1, 8, 512, dtype=HALF), torch.full((1, 8, 192), 2.0, dtype=HALF)[..., 128:]
    values = (query, cache, table, starts, lengths, 1, 40, 0.1, 512)
    given = dict(zip(OPERATORS["mla_decode"].parameters, values, strict=False))
    assert answer("mla_decode", **given, query_rope=rope) is True
    assert "query_rope" in str(answer("mla_decode", **given, query_rope=rope.float()))
    mla.mla_decode(**given, query_rope=rope)
    (call,) = npu.made
    assert call.args[0].data_ptr() == query.data_ptr()
    assert torch.equal(call.query_rope, rope)


def test_a_large_latent_batch_is_copied_in_parts(npu: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "COPIED_AT_ONCE", 256)
    cache, query = torch.zeros(9, 128, 576, dtype=HALF), torch.zeros(4, 2, 576, dtype=HALF)
    table = torch.zeros(3, 4, dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1, 3, 4], dtype=torch.int32), torch.tensor([100, 90, 300], dtype=torch.int32)
    mla.mla_decode(query, cache, table, starts, lengths, 2, 300, 0.1, 512)
    assert [call.actual_seq_kvlen for call in npu.made] == [[100, 90], [300]]
    assert [call.actual_seq_qlen for call in npu.made] == [[1, 3], [1]]
    assert [call.sparse_mode for call in npu.made] == [3, 0]


def test_a_long_request_goes_in_pieces_of_16_queries_over_one_copy_of_its_blocks(npu: Calls) -> None:
    cache, query = torch.zeros(9, 128, 576, dtype=HALF), torch.zeros(38, 2, 576, dtype=HALF)
    table = torch.tensor([[3], [7]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1, 38], dtype=torch.int32), torch.tensor([5, 60], dtype=torch.int32)
    mla.mla_decode(query, cache, table, starts, lengths, 37, 60, 0.1, 512)
    (call,) = npu.made
    assert call.actual_seq_qlen == [1, 17, 33, 38]
    assert call.actual_seq_kvlen == [5, 39, 55, 60]
    assert call.block_table.tolist() == [[0], [1], [1], [1]]
    assert call.args[1].shape == (2, 128, 512)
    assert call.sparse_mode == 3


def test_requests_without_keys_take_no_part_in_a_latent_prefill(npu: Calls) -> None:
    query, key = torch.zeros(6, 2, 192, dtype=torch.bfloat16), torch.zeros(9, 2, 192, dtype=torch.bfloat16)
    starts = torch.tensor([0, 2, 3, 6], dtype=torch.int32), torch.tensor([0, 5, 5, 9], dtype=torch.int32)
    out, lse = mla.mla_prefill(query, key, key[..., :128], *starts, 3, 5, 0.1, None, False)
    assert [(call.actual_seq_qlen, call.actual_seq_kvlen) for call in npu.made] == [([2], [5]), ([3], [4])]
    assert (out[2] == 0).all()
    assert lse[:, 2].isinf().all()
    assert (lse[:, 3:] == 1).all()
    assert lse.dtype is torch.float32


def test_starts_that_the_caller_of_a_latent_prefill_knows_are_not_read_from_the_device(
    npu: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key = torch.zeros(6, 2, 192, dtype=torch.bfloat16), torch.zeros(9, 2, 192, dtype=torch.bfloat16)
    starts = torch.tensor([0, 2, 3, 6], dtype=torch.int32), torch.tensor([0, 5, 5, 9], dtype=torch.int32)
    monkeypatch.setattr(Tensor, "tolist", lambda self: pytest.fail("the device was waited for"))
    mla.mla_prefill(query, key, key[..., :128], *starts, 3, 5, 0.1, None, False, [0, 2, 3, 6], [0, 5, 5, 9])
    assert [(call.actual_seq_qlen, call.actual_seq_kvlen) for call in npu.made] == [([2], [5]), ([3], [4])]


def test_more_queries_than_keys_are_declined_before_anything_is_written(npu: Calls) -> None:
    query, key = torch.zeros(3, 2, 192, dtype=torch.bfloat16), torch.zeros(2, 2, 192, dtype=torch.bfloat16)
    with pytest.raises(NotSupported, match="more queries than keys"):
        mla.mla_prefill(query, key, key[..., :128], torch.tensor([0, 3]), torch.tensor([0, 2]), 3, 2, 0.1)
    assert not npu.made


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_angles_are_given_for_both_elements_of_a_pair_in_the_querys_dtype(npu: Calls) -> None:
    table, query = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(3, 2, 6, dtype=HALF)
    for interleaved, row in ((False, [3, 4, 3, 4]), (True, [3, 3, 4, 4])):
        rotary.rotary_embedding(query, None, table, table, torch.tensor([1, 0, 1]), interleaved, False)
        _, cos, sin, mode = npu.made[-1].args
        assert cos.shape == (1, 3, 1, 4)
        assert cos.dtype is sin.dtype is HALF
        assert cos[0, 0, 0].tolist() == row
        assert mode == ("interleave" if interleaved else "half")


def test_the_part_of_a_head_that_is_not_rotated_stays(npu: Calls) -> None:
    query, table = torch.zeros(3, 2, 6, dtype=HALF), torch.ones(2, 2)
    rotated, _ = rotary.rotary_embedding(query, None, table, table, torch.tensor([1, 0, 1]))
    assert rotated is query
    assert query[0, 0].tolist() == [1, 1, 1, 1, 0, 0]


def test_the_sum_with_a_residual_is_the_kernels_and_nothing_is_overwritten(npu: Calls) -> None:
    x, residual = torch.ones(2, 4), torch.full((2, 4), 2.0)
    y, total = normalization.rms_norm(x, residual, torch.ones(4), 1e-5)
    assert (x == 1).all()
    assert (residual == 2).all()
    assert (total == 3).all()
    assert (y == 2).all()
    assert npu.made[0].args[3] == 1e-5


def test_absent_experts_are_sorted_last_and_the_groups_cover_all_rows(npu: Calls) -> None:
    npu.results = {
        "npu_moe_init_routing_v2": (
            torch.ones(6, 4),
            torch.arange(6, dtype=torch.int32),
            torch.tensor([1, 3, 2]),
            None,
        ),
        "npu_grouped_matmul": lambda x, weight, **_: [x[0] @ weight[0][0]],
        "npu_swiglu": lambda x, dim: x[..., : x.shape[-1] // 2],
        "npu_moe_token_unpermute": lambda y, places, probs: y[: len(probs)],
    }
    ids, here = torch.tensor([[0, 2], [3, 2], [-1, 3]]), torch.tensor([-1, -1, 1, 0], dtype=torch.int32)
    weights = torch.full((3, 2), 0.5)
    experts.fused_moe(torch.ones(3, 4), torch.ones(2, 6, 4), torch.ones(2, 4, 3), weights, ids, expert_map=here)
    routed, first, _, _, unpermuted = npu.made
    assert routed.args[1].tolist() == [[2, 1], [0, 1], [2, 0]]
    assert routed.args[1].dtype is torch.int32
    assert routed.expert_num == 3
    assert routed.active_expert_range == [0, 3]
    assert first.group_list.tolist() == [1, 5]
    assert first.args[1][0].shape == (2, 4, 6)
    assert unpermuted.probs.tolist() == [[0.0, 0.5], [0.5, 0.5], [0.0, 0.5]]
    assert (unpermuted.args[0][4:] == 0).all()
    assert (unpermuted.args[0][:4] != 0).all()


def test_weights_are_scores_whatever_the_kernel_says_they_are(npu: Calls) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=HALF)
    npu.results = {"npu_moe_gating_top_k": (torch.full((1, 2), 77.0), torch.tensor([[3, 1]], dtype=torch.int32), None)}
    weights, ids = routing.topk_sigmoid(logits, 2)
    assert torch.allclose(weights, torch.tensor([[3.0, 1.0]]).sigmoid())
    assert ids.tolist() == [[3, 1]]
    assert npu.made[0].args[0].dtype is torch.float32
    assert npu.made[0].norm_type == 1


def test_a_dtype_that_the_documentation_does_not_name_is_declined_by_name() -> None:
    x = torch.zeros(2, 4, dtype=torch.bfloat16)
    assert linear.supports_linear(x, x) == "x is bfloat16; npu_linear takes float32 or float16"


# -- quantization -----------------------------------------------------------------------------------------------------


def test_groups_and_all_rows_are_rows_of_their_own_for_the_kernel(npu: Calls) -> None:
    npu.results["npu_dynamic_quant"] = lambda x: (x.to(torch.int8), torch.arange(1.0, 1 + len(x)))
    x = torch.ones(2, 3, 8, dtype=HALF)
    for group, rows, scales in ((0, 6, [1.0]), (4, 12, [1.0, 2.0]), (-1, 1, [1.0])):
        q, found = quantization.quantize(x, "int8", group)
        assert npu.made[-1].args[0].shape == (rows, 48 // rows)
        assert q.shape == x.shape
        assert found.shape == (2, 3, len(scales))
        assert found[0, 0].tolist() == scales


def test_a_row_of_zeros_has_the_least_scale(npu: Calls) -> None:
    npu.results["npu_dynamic_quant"] = lambda x: (x.to(torch.int8), torch.zeros(len(x)))
    _, scales = quantization.quantize(torch.zeros(2, 8, dtype=HALF), "int8")
    assert scales.tolist() == [[pytest.approx(1e-10)]] * 2


def test_a_given_scale_divides_float32_and_nothing_becomes_minus_128(npu: Calls) -> None:
    npu.results["npu_quantize"] = lambda x, *_: torch.full(x.shape, -128, dtype=torch.int8)
    q, scales = quantization.quantize(torch.ones(2, 8, dtype=HALF), "int8", -1, torch.tensor([0.5]))
    x, scale, zeros, dtype, axis, divides = npu.made[0].args
    assert (x.dtype, scale.tolist(), zeros, dtype, axis, divides) == (torch.float32, [0.5], None, torch.qint8, -1, True)
    assert (q == -127).all()
    assert scales.tolist() == [[0.5], [0.5]]


def test_a_scaled_product_has_the_weight_transposed_and_its_bias_in_float32(npu: Calls) -> None:
    npu.results["npu_quant_matmul"] = lambda x, weight, *_, **__: x.new_ones(len(x), weight.shape[1])
    x, weight = torch.ones(2, 3, 8, dtype=torch.int8), torch.ones(4, 8, dtype=torch.int8)
    quantization.scaled_linear(
        x, torch.ones(2, 3, 1), weight, torch.ones(1, 1), torch.ones(4, dtype=torch.bfloat16), "bfloat16"
    )
    (call,) = npu.made
    assert [one.shape for one in call.args] == [(6, 8), (8, 4), (1,)]
    assert call.args[1].data_ptr() == weight.data_ptr(), "a copy of the weight"
    assert call.pertoken_scale.shape == (6,)
    assert (call.bias.dtype, call.output_dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("zero", [None, torch.tensor([[3, 15], [8, 0]], dtype=torch.int8)], ids=["middle", "zeros"])
def test_four_bits_become_int8_and_zero_points_offsets(npu: Calls, zero: Tensor | None) -> None:
    npu.results["npu_weight_quant_batchmatmul"] = lambda x, weight, *_, **__: x.new_ones(len(x), weight.shape[1])
    x, packed = torch.ones(3, 64, dtype=HALF), torch.arange(64, dtype=torch.uint8).view(2, 32)
    quantization.weight_only_linear(x, packed, torch.ones(2, 2, dtype=HALF), zero)
    (call,) = npu.made
    numbers = [number - (8 if zero is None else 0) for byte in range(32) for number in (byte & 15, byte >> 4)]
    assert call.args[1].dtype is torch.int8
    assert call.args[1][:, 0].tolist() == numbers
    assert call.antiquant_group_size == 32
    offsets = None if zero is None else [[-3, -8], [-15, 0]]
    assert (None if call.antiquant_offset is None else call.antiquant_offset.tolist()) == offsets


def test_one_group_is_a_scale_for_each_column(npu: Calls) -> None:
    npu.results["npu_weight_quant_batchmatmul"] = lambda x, weight, *_, **__: x.new_ones(len(x), weight.shape[1])
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    scale, bias = torch.ones(5, 1, dtype=x.dtype), torch.ones(5, dtype=x.dtype)
    quantization.weight_only_linear(x, torch.ones(5, 64, dtype=torch.int8), scale, None, bias)
    (call,) = npu.made
    assert (call.args[2].shape, call.antiquant_group_size, call.bias.dtype) == ((1, 5), 0, torch.float32)


@pytest.fixture
def routed(npu: Calls) -> Calls:
    """Three tokens with an expert each: one has the first, two the second."""
    npu.results |= {
        "npu_moe_init_routing_v2": lambda x, *_, quant_mode, **__: (
            x.to(torch.int8) if quant_mode == 1 else x,
            torch.arange(3, dtype=torch.int32),
            torch.tensor([1, 2, 0]),
            torch.full((3,), 0.5),
        ),
        "npu_grouped_matmul": lambda x, weight, **_: [x[0].new_ones(3, weight[0].shape[2])],
        "npu_dequant_swiglu_quant": lambda x, **_: (
            x.new_ones(3, x.shape[1] // 2).to(torch.int8),
            torch.full((3,), 2.0),
        ),
        "npu_swiglu": lambda x, dim: x[..., : x.shape[-1] // 2],
        "npu_moe_token_unpermute": lambda y, places, probs: y,
    }
    return npu


def chosen(kind: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Rows of 16 elements, and an expert for each."""
    return torch.ones(3, 16, dtype=kind), (torch.ones(3, 1), torch.tensor([[0], [1], [1]]))


@pytest.mark.parametrize("kind", [HALF, torch.bfloat16], ids=["float16", "bfloat16"])
def test_experts_of_int8_keep_int32_and_their_last_scales_are_what_the_kernel_wants(
    routed: Calls, kind: torch.dtype
) -> None:
    w13, w2 = torch.ones(2, 128, 16, dtype=INT8), torch.ones(2, 16, 64, dtype=INT8)
    x, routing = chosen(kind)
    quantized_experts.scaled_moe(x, w13, torch.ones(2, 128, 1), w2, torch.ones(2, 16, 1), *routing)
    _, first, between, second, _ = routed.made
    assert first.args[1][0].data_ptr() == w13.data_ptr(), "a copy of the weight"
    assert first.output_dtype is torch.int32
    assert not hasattr(first, "scale")
    assert (between.weight_scale.shape, between.activation_scale.tolist()) == ((2, 128), [[0.5]] * 3)
    assert (between.group_index.tolist(), between.activate_left, between.quant_mode) == ([1, 2], True, 1)
    (scale,), (rows,) = second.scale, second.per_token_scale
    assert (scale.shape, scale.dtype) == ((2, 16), torch.float32 if kind is HALF else kind)
    assert rows.tolist() == [2.0] * 3
    assert second.output_dtype is kind


@pytest.mark.parametrize("zero", [None, 3], ids=["middle", "zeros"])
def test_four_bits_of_experts_become_words_of_int4_and_zero_points_offsets(routed: Calls, zero: int | None) -> None:
    packed = torch.arange(256, dtype=torch.int32).view(2, 16, 8).to(torch.uint8)
    w2, groups = torch.zeros(2, 16, 4, dtype=torch.uint8), 1 if zero else 2
    scales = [torch.ones(2, 16, count, dtype=HALF) for count in (groups, 1)]
    zeros = [None if zero is None else torch.full((2, 16, 1), zero, dtype=INT8)] * 2
    x, routing = chosen(HALF)
    quantized_experts.weight_only_moe(
        x, packed, scales[0], w2, scales[1], *routing, "silu", False, None, None, None, *zeros
    )
    first = next(call for call in routed.made if call.name == "npu_grouped_matmul")
    (words,), (scale,), (offset,) = first.args[1], first.antiquant_scale, first.antiquant_offset
    assert (words.dtype, words.shape, words.stride()) == (torch.int32, (2, 2, 16), (32, 1, 2))
    numbers = [(int(words[0, 0, 5]) >> 4 * place & 15) for place in range(8)]
    expected = [number for byte in packed[0, 5, :4].tolist() for number in (byte & 15, byte >> 4)]
    assert [(number ^ 8) for number in numbers] == expected, "int4 is 8 less"
    assert scale.shape == offset.shape == ((2, 16) if zero else (2, 2, 16))
    assert offset.unique().tolist() == [0 if zero is None else 8 - zero]


def test_eight_bits_of_experts_go_as_they_lie(routed: Calls) -> None:
    w13, w2 = torch.ones(2, 16, 16, dtype=INT8), torch.ones(2, 16, 8, dtype=INT8)
    scale, zero = torch.ones(2, 16, 1, dtype=HALF), torch.full((2, 16, 1), 3, dtype=INT8)
    x, routing = chosen(HALF)
    quantized_experts.weight_only_moe(x, w13, scale, w2, scale, *routing, "silu", False, None, None, None, zero, zero)
    first = next(call for call in routed.made if call.name == "npu_grouped_matmul")
    assert first.args[1][0].data_ptr() == w13.data_ptr(), "a copy of the weight"
    assert first.antiquant_offset[0].unique().tolist() == [-3]


def few_bits(**changed: Any) -> Any:
    """Arguments of ``weight_only_moe`` that are declined for what is changed."""
    scale, (x, routing) = torch.ones(2, 16, 2, dtype=HALF), chosen(HALF)
    weight = torch.zeros(2, 16, 8, dtype=torch.uint8)
    arguments = {"hidden_states": x, "w13": weight, "w13_scale": scale, "w2": weight, "w2_scale": scale}
    return arguments | dict(zip(("topk_weights", "topk_ids"), routing, strict=True)) | changed


def rows_too(**changed: Any) -> Any:
    """The same of ``scaled_moe``."""
    weights = {"w13": torch.ones(2, 128, 16, dtype=INT8), "w2": torch.ones(2, 16, 64, dtype=INT8)}
    scales = {"w13_scale": torch.ones(2, 128, 1), "w2_scale": torch.ones(2, 16, 1)}
    return few_bits(**weights, **scales) | changed


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("weight_only_moe", few_bits(hidden_states=torch.ones(3, 16)), "hidden_states is float32"),
        ("weight_only_moe", few_bits(w13=torch.ones(2, 16, 16).to(FP8)), "w13 is float8_e4m3fn"),
        ("weight_only_moe", few_bits(w13_zero=torch.ones(2, 16, 2).to(INT8)), "w13 has zero points in groups"),
        ("weight_only_moe", few_bits(w2=torch.ones(2, 16, 16).to(INT8)), "w2 has 8 bits in groups"),
        ("weight_only_moe", few_bits(w2=torch.ones(2, 16, 6).to(torch.uint8)), "rows of w2 have 12 elements"),
        ("weight_only_moe", few_bits(w2_scale=torch.ones(2, 16, 16).half()), "a group has 1 elements"),
        ("weight_only_moe", few_bits(activation="relu2_no_mul"), "activation 'relu2_no_mul' is not one of silu"),
        ("weight_only_moe", few_bits(w2_bias=torch.ones(2, 16)), "there are biases"),
        (
            "weight_only_moe",
            few_bits(rounding="int8"),
            "rows are rounded to int8; npu_grouped_matmul gives a half type",
        ),
        ("scaled_moe", rows_too(hidden_states=torch.ones(3, 16)), "hidden_states is float32"),
        ("scaled_moe", rows_too(w2=torch.ones(2, 16, 64).to(FP8)), "w2 is float8_e4m3fn"),
        ("scaled_moe", rows_too(block_size=128), "there are blocks of 128"),
        ("scaled_moe", rows_too(x2_scale=torch.ones(2)), "scales of rows are given"),
        ("scaled_moe", rows_too(activation="gelu"), "activation 'gelu' is not silu"),
        ("scaled_moe", rows_too(w2=torch.ones(2, 16, 48).to(INT8)), "an expert has 48 elements"),
    ],
)
def test_experts_that_the_documentation_does_not_quantize_are_declined_by_name(
    name: str, arguments: dict[str, Any], why: str
) -> None:
    assert answer(name, **(rows_too() if name == "scaled_moe" else few_bits())) is True
    assert why in str(answer(name, **arguments))


@pytest.mark.parametrize(
    ("operator", "arguments", "why"),
    [
        ("quantize", (torch.ones(2, 8, dtype=HALF), "float8_e4m3fn"), "quantize to int8, not to float8_e4m3fn"),
        ("quantize", (torch.ones(2, 8), "int8"), "x is float32; npu_dynamic_quant takes float16 or bfloat16"),
        ("quantize", (torch.ones(2, 8, dtype=HALF), "int8", 3), "a shorter last group of 3"),
        ("scaled_linear", (torch.ones(2, 8).to(FP8), ONE, torch.ones(4, 8).to(FP8), ONE), "x is float8_e4m3fn"),
        ("scaled_linear", (*[torch.ones(2, 8).to(INT8), ONE] * 2, None, "float32"), "makes float16 or bfloat16"),
        ("scaled_linear", (*[torch.ones(2, 8).to(INT8), ONE] * 2, None, "float16", 128), "there are blocks of 128"),
        ("scaled_linear", (torch.ones(1, 65536).to(INT8), ONE, torch.ones(1, 65536).to(INT8), ONE), "1 x 65536"),
        ("weight_only_linear", (torch.ones(2, 8), torch.ones(2, 8).to(INT8), ONE), "x is float32"),
        ("weight_only_linear", (torch.ones(2, 8).half(), torch.ones(2, 8).to(FP8), ONE), "weight is float8_e4m3fn"),
        (
            "weight_only_linear",
            (torch.ones(2, 32).half(), torch.ones(1, 32).to(INT8), torch.ones(1, 2).half()),
            "a group has 16 elements; npu_weight_quant_batchmatmul takes multiples of 32",
        ),
    ],
)
def test_what_the_documentation_does_not_quantize_is_declined_by_name(
    operator: str, arguments: tuple[Any, ...], why: str
) -> None:
    supports = implementation(operator).supports
    assert supports is not None
    assert why in str(supports(*arguments))


@pytest.mark.parametrize(("tokens", "layout", "copied"), [(2, "TND", (8, 1, 512)), (64, "PA_BSND", (1, BLOCK, 1, 512))])
def test_listed_rows_are_copied_or_whole_blocks_where_these_are_fewer(
    npu: Calls, tokens: int, layout: str, copied: tuple[int, ...]
) -> None:
    """Four rows of each query, or the 128 of the request's one block."""
    query, cache = torch.randn(tokens, 2, 576).to(HALF), torch.randn(3, BLOCK, 576).to(HALF)
    lists = torch.tensor([[5, 7, 1, -1]], dtype=torch.int32).expand(tokens, 4)
    starts, table = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, tokens], [[2]]))
    sparse_latent.mla_sparse(query, cache, lists, table, starts, tokens, 0.1, 512)
    (call,) = npu.made
    assert (call.layout_kv, call.args[1].shape) == (layout, copied)


def test_whole_blocks_of_several_requests_are_no_more_than_what_is_copied_at_once(
    npu: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_latent, "COPIED_AT_ONCE", BLOCK)
    query, cache = torch.randn(64, 2, 576).to(HALF), torch.randn(3, BLOCK, 576).to(HALF)
    lists, starts, table = (
        torch.tensor(numbers, dtype=torch.int32) for numbers in ([[5, 7, 1, -1]], [0, 40, 64], [[2], [1]])
    )
    sparse_latent.mla_sparse(query, cache, lists.expand(64, 4), table, starts, 40, 0.1, 512)
    assert [(call.layout_kv, call.args[1].shape[0]) for call in npu.made] == [("TND", BLOCK)] * 2


def test_index_keys_are_copied_in_parts_however_many_requests_there_are(
    npu: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_latent, "COPIED_AT_ONCE", 2 * BLOCK)
    torch.manual_seed(0)
    requests, topk = 9, 4
    given = [1, 3, 0, 2, 1, 1, 5, 1, 2]
    starts = torch.tensor([0, *itertools.accumulate(given)], dtype=torch.int32)
    lengths = torch.randint(5, BLOCK, (requests,), dtype=torch.int32)
    keys = torch.randn(requests, 2 * BLOCK, INDEX_DIM).to(HALF)[:, :BLOCK]  # blocks lie apart
    table = torch.randperm(requests, dtype=torch.int32)[:, None]
    query, weights = torch.randn(int(starts[-1]) + 3, 2, INDEX_DIM).to(HALF), torch.rand(int(starts[-1]) + 3, 2)
    reference = OPERATORS["index_topk"].reference

    def listed(q: Tensor, keys: Tensor, w: Tensor, **said: Any) -> tuple[Tensor, None]:
        ends, seen = said["actual_seq_lengths_query"], said["actual_seq_lengths_key"]
        begins = torch.nn.functional.pad(ends, (1, 0))
        return reference(q, w, keys[:, :, 0], said["block_table"], begins, seen, 9, BLOCK, topk)[:, None], None

    npu.results["npu_lightning_indexer"] = listed
    asked = (query, weights, keys, table, starts, lengths, 5, BLOCK, topk)
    right = reference(*asked)
    with Largest() as largest:
        found = sparse_latent.index_topk(*asked)
    assert torch.equal(found[: starts[-1]], right[: starts[-1]])
    assert [call.args[1].shape for call in npu.made] == [(2, BLOCK, 1, INDEX_DIM)] * 4 + [(1, BLOCK, 1, INDEX_DIM)]
    assert largest.elements == 2 * BLOCK * INDEX_DIM


# -- availability -----------------------------------------------------------------------------------------------------


def test_without_torch_npu_nothing_is_available_and_the_reason_says_so() -> None:
    found, why = implementation("rms_norm").availability()
    assert not found
    assert why in ("torch_npu is not installed", "no Ascend NPU that PyTorch can use")


def test_the_attention_class_is_named_by_its_path_and_no_host_is_imported() -> None:
    path = implementation("attention_backend").fn()
    assert path == "fl_dispatch.backends.vendor.ascend.impl.attention.AscendAttentionBackend"
    assert implementation("attention_backend").fn(True) == call_op("attention_backend", True)
