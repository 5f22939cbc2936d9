"""Emulated kernels refuse what the documentation refuses, by one error that names the rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu

import emulated_npu

HALF = torch.float16
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def ones(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


def ints(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="npu")


def attend(query: tuple[int, ...] = (4, 2, 128), dtype: torch.dtype = HALF, **changed: Any) -> Any:
    """A paged call that is right but for what is changed."""
    size = changed.get("block_size", 16)
    cache = changed.pop("cache", ones(4, size, 2 * query[-1], dtype=dtype))
    arguments = {
        "actual_seq_lengths": [1, 4], "actual_seq_lengths_kv": [20, 3], "block_table": ints([[1, 2], [3, 0]]),
        "num_heads": 2, "input_layout": "TND", "block_size": 16, "atten_mask": TRIANGLE.npu(), "sparse_mode": 3,
    } | changed  # fmt: skip
    return torch_npu.npu_fused_infer_attention_score(ones(*query, dtype=dtype), cache, cache, **arguments)


def scatter(**changed: Any) -> Any:
    arguments = {
        "key": ones(2, 2, 16), "value": ones(2, 2, 16), "key_cache": ones(3, 4, 2, 16),
        "value_cache": ones(3, 4, 2, 16), "slot_mapping": ints([3, 7]), "cache_mode": "Norm",
    } | changed  # fmt: skip
    return torch_npu.npu_scatter_pa_kv_cache(**arguments)


def grouped(**changed: Any) -> Any:
    arguments = {
        "x": [ones(4, 16)], "weight": [ones(2, 16, 8)], "group_list": ints([1, 3], torch.int64), "split_item": 2,
        "group_type": 0, "group_list_type": 1,
    } | changed  # fmt: skip
    return torch_npu.npu_grouped_matmul(arguments.pop("x"), arguments.pop("weight"), **arguments)


def int8_experts(**changed: Any) -> Any:
    single = torch.float32
    arguments = {
        "x": [ones(4, 16, dtype=torch.int8)], "weight": [ones(2, 16, 8, dtype=torch.int8)],
        "scale": [ones(2, 8, dtype=single)], "per_token_scale": [ones(4, dtype=single)], "output_dtype": HALF,
    }  # fmt: skip
    return grouped(**(arguments | changed))


def few_bit_experts(**changed: Any) -> Any:
    """int4 that lies along K, in two groups."""
    arguments = {
        "weight": [ones(2, 8, 2, dtype=torch.int32).transpose(1, 2)], "antiquant_scale": [ones(2, 2, 8)],
        "antiquant_offset": [torch.zeros_like(ones(2, 2, 8))],
    }  # fmt: skip
    return grouped(**(arguments | changed))


def swiglu(**changed: Any) -> Any:
    single = torch.float32
    arguments = {
        "x": ones(4, 256, dtype=torch.int32), "weight_scale": ones(2, 256, dtype=single), "quant_mode": 1,
        "activation_scale": ones(4, dtype=single), "group_index": ints([1, 3], torch.int64), "activate_left": True,
    } | changed  # fmt: skip
    return torch_npu.npu_dequant_swiglu_quant(arguments.pop("x"), **arguments)


def scaled(**changed: Any) -> Any:
    single = torch.float32
    arguments = {
        "x1": ones(3, 16, dtype=torch.int8), "x2": ones(16, 8, dtype=torch.int8), "scale": ones(8, dtype=single),
        "pertoken_scale": ones(3, dtype=single), "output_dtype": torch.float16,
    } | changed  # fmt: skip
    return torch_npu.npu_quant_matmul(**arguments)


def weight_only(**changed: Any) -> Any:
    arguments = {
        "x": ones(3, 64), "weight": ones(64, 8, dtype=torch.int8), "antiquant_scale": ones(2, 8),
        "antiquant_group_size": 32,
    } | changed  # fmt: skip
    return torch_npu.npu_weight_quant_batchmatmul(**arguments)


def quantized(kind: torch.dtype = torch.float32, **changed: Any) -> Any:
    arguments = {
        "input": ones(3, 8, dtype=kind), "scales": ones(1, dtype=torch.float32), "zero_points": None,
        "dtype": torch.qint8, "axis": -1,
    } | changed  # fmt: skip
    return torch_npu.npu_quantize(**arguments)


def listed(**changed: Any) -> Any:
    arguments = {
        "query": ones(3, 8, 128), "key": ones(4, 16, 1, 128), "weights": ones(3, 8, dtype=torch.float32),
        "actual_seq_lengths_query": ints([2, 3]), "actual_seq_lengths_key": ints([20, 3]),
        "block_table": ints([[1, 2], [3, 0]]), "layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": 4,
    } | changed  # fmt: skip
    return torch_npu.npu_lightning_indexer(
        arguments.pop("query"), arguments.pop("key"), arguments.pop("weights"), **arguments
    )


def sparse(**changed: Any) -> Any:
    arguments = {
        "query": ones(3, 8, 512), "key": ones(4, 16, 1, 512), "lists": ints([[[0, 19]], [[5, -1]], [[2, 1]]]),
        "query_rope": ones(3, 8, 64), "key_rope": ones(4, 16, 1, 64), "block_table": ints([[1, 2], [3, 0]]),
        "actual_seq_lengths_query": ints([2, 3]), "actual_seq_lengths_kv": ints([20, 3]), "layout_query": "TND",
        "layout_kv": "PA_BSND", "sparse_mode": 0, "attention_mode": 2,
    } | changed  # fmt: skip
    key = arguments.pop("key")
    value = arguments.pop("value", key)
    return torch_npu.npu_sparse_flash_attention(
        arguments.pop("query"), key, value, arguments.pop("lists"), 0.1, **arguments
    )


def update(dim: int) -> Any:
    return torch_npu.npu_attention_update([ones(3, dtype=torch.float32)], [ones(3, dim)], 0)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch_npu.npu_rms_norm(ones(2, 8), ones(8, dtype=torch.float32)), "dtypes must be equal"),
    (lambda: torch_npu.npu_rms_norm(ones(2, 8), ones(4)), "gamma (4,) must be the last dimensions"),
    (lambda: torch_npu.npu_rms_norm(ones(8), ones(8)), "1 dimensions, not 2 to 8"),
    (lambda: torch_npu.npu_add_rms_norm(ones(2, 8), ones(1, 8), ones(8)), "must have one shape"),
    (lambda: torch_npu.npu_gemma_rms_norm(ones(8, 2).t(), ones(8)), "input must be contiguous"),
    (lambda: torch_npu.npu_swiglu(ones(2, 7)), "7, which two halves cannot share"),
    (lambda: torch_npu.npu_clipped_swiglu(ones(8)), "x has one dimension"),
    (lambda: torch_npu.npu_clipped_swiglu(ones(8, 2).t()), "x must be contiguous"),
    (lambda: torch_npu.npu_layer_norm_eval(ones(2, 8), [4]), "(4,) are not the last dimensions"),
    (lambda: torch_npu.npu_layer_norm_eval(ones(2, 8), [8], ones(8, dtype=torch.float32)), "dtypes must be equal"),
    (lambda: torch_npu.npu_linear(*[ones(2, 8, dtype=torch.bfloat16)] * 2), "input has dtype bfloat16"),
    (lambda: torch_npu.npu_linear(ones(1, 2, 8), ones(4, 8)), "3 and 2 dimensions, not 2"),
    (lambda: torch_npu.npu_linear(ones(2, 8), ones(8, 4)), "share no inner dimension"),
    (lambda: torch_npu.npu_scatter_nd_update_(ones(4, 8), ints([[4]]), ones(1, 8)), "outside of dimension 0"),
    (lambda: torch_npu.npu_scatter_nd_update_(ones(4, 8), ints([1]), ones(1, 8)), "at least 2 are wanted"),
    (lambda: torch_npu.npu_scatter_nd_update_(ones(4, 8), ints([[1]]), ones(1, 4)), "updates are (1, 4), not (1, 8)"),
    (lambda: torch_npu.npu_rotary_mul(ones(1, 3, 2, 8), ones(1, 3, 1, 4), ones(1, 3, 1, 4)), "r1 has D 4"),
    (lambda: torch_npu.npu_rotary_mul(ones(2, 3, 4, 8), *[ones(1, 3, 4, 8)] * 2), "no layout of coefficients"),
    (lambda: torch_npu.npu_rotary_mul(ones(2, 3, 4, 8), *[ones(2, 3, 1, 8)] * 2, "interleave"), "no layout"),
    (lambda: torch_npu.npu_rotary_mul(ones(1, 2, 1, 896), *[ones(1, 2, 1, 896)] * 2), "below 896"),
    (lambda: torch_npu.npu_apply_rotary_pos_emb(*[ones(1, 2, 1, 32)] * 4), "D 32, not 64 or 128"),
    (lambda: torch_npu.npu_interleave_rope(*[ones(1, 1, 2, 64, dtype=torch.float32)] * 3), "float32, not one of"),
    (lambda: torch_npu.npu_mrope(ints([5]), ones(1, 32), ones(1, 32), ones(4, 32), 32), "beyond the cache's 4 rows"),
    (lambda: torch_npu.npu_mrope(ints([0]), ones(1, 32), ones(1, 32), ones(4, 16), 32), "no multiple of 32"),
    (lambda: scatter(key=ones(2, 16, 2).transpose(1, 2)), "key must be contiguous"),
    (lambda: scatter(slot_mapping=ints([3, 12])), "slot 12 of 12"),
    (lambda: scatter(slot_mapping=ints([3, 3])), "slots must not repeat"),
    (lambda: scatter(slot_mapping=ints([3.0, 7.0], torch.float32)), "not int32 or int64"),
    (lambda: scatter(key_cache=ones(3, 4, 32), value_cache=ones(3, 4, 32)), "3 dimensions, not 4"),
    (lambda: scatter(value=ones(2, 2, 16, dtype=torch.bfloat16)), "dtypes must be equal"),
    (lambda: attend(dtype=torch.float32), "query has dtype float32"),
    (lambda: attend(query=(4, 2, 64)), "TND takes D 128"),
    (lambda: attend(block_size=24), "block_size=24; a multiple of 16 up to 1024"),
    (lambda: attend(cache=ones(4, 16, 2, 128)), "[blocks, KV heads, block_size, D]"),
    (lambda: attend(cache=ones(4, 2, 16, 256)[:, 0]), "key must be contiguous"),
    (lambda: attend(atten_mask=None), "needs the atten_mask of 2048 x 2048"),
    (lambda: attend(atten_mask=TRIANGLE[:1024, :1024].contiguous().npu()), "not 2048 x 2048"),
    (lambda: attend(atten_mask=(~TRIANGLE).npu()), "1 above the diagonal"),
    (lambda: attend(atten_mask=TRIANGLE.half().npu()), "not bool, int8 or uint8"),
    (lambda: attend(actual_seq_lengths=[1, 3]), "ends at 3, and there are 4 tokens"),
    (lambda: attend(actual_seq_lengths=[3, 1]), "must be cumulative"),
    (lambda: attend(actual_seq_lengths=None), "must be given for layout TND"),
    (lambda: attend(actual_seq_lengths_kv=[20]), "2 sequences of queries, 1 of keys"),
    (lambda: attend(actual_seq_lengths_kv=[40, 3]), "3 blocks; block_table has 2 columns"),
    (lambda: attend(block_table=ints([[1, 4], [3, 0]])), "block [1, 4] of 4"),
    (lambda: attend(block_table=ints([[1, 2], [3, 0]], torch.int64)), "block_table is torch.int64, not int32"),
    (lambda: attend(sparse_mode=5), "sparse_mode=5"),
    (lambda: attend(num_heads=3), "TND has 2 heads, and 3 are named"),
    (lambda: attend(input_layout="BSND", query=(2, 4, 2, 128)), "block_size=16; 128, 256, 384 or 512"),
    (lambda: attend(quant_scale1=ones(1, dtype=torch.float32)), "is not emulated"),
    (lambda: listed(query=ones(3, 8, 64), key=ones(4, 16, 1, 64)), "D is 64, not 128"),
    (lambda: listed(query=ones(3, 65, 128), weights=ones(3, 65)), "65 heads, above 64"),
    (lambda: listed(weights=ones(3, 8, dtype=torch.bfloat16)), "not float32 or as the query"),
    (lambda: listed(query=ones(3, 8, 128, dtype=torch.float32)), "query has dtype float32"),
    (lambda: listed(key=ones(4, 16, 2, 128)[:, :, :1]), "key must be contiguous"),
    (lambda: listed(key=ones(4, 24, 1, 128)), "block_size=24; a multiple of 16 up to 1024"),
    (lambda: listed(sparse_count=2049), "sparse_count=2049"),
    (lambda: listed(sparse_mode=4), "sparse_mode=4, not 0 or 3"),
    (lambda: listed(actual_seq_lengths_query=ints([2, 1])), "must be sums"),
    (lambda: listed(actual_seq_lengths_query=ints([2, 4])), "ends at 4, behind 3 tokens"),
    (lambda: listed(actual_seq_lengths_key=ints([20, 3], torch.int64)), "must be int32 [B]"),
    (lambda: listed(actual_seq_lengths_key=ints([40, 3])), "40 keys are 3 blocks; block_table has 2 columns"),
    (lambda: listed(return_value=True), "return_value is not for PA_BSND"),
    (lambda: listed(layout_query="BSND"), "is not emulated; TND are"),
    (lambda: sparse(attention_mode=0), "attention_mode=0, not 2"),
    (lambda: sparse(query=ones(3, 3, 512), query_rope=ones(3, 3, 64)), "3 heads, not a power of two"),
    (lambda: sparse(query=ones(3, 8, 256), key=ones(4, 16, 1, 256)), "D is 256 and 64, not 512 and 64"),
    (lambda: sparse(query_rope=None), "both ropes must be given"),
    (lambda: sparse(value=2 * ones(4, 16, 1, 512)), "value must be the key"),
    (lambda: sparse(lists=ints([[[-1, 19]], [[5, -1]], [[2, 1]]])), "must stand before the invalid ones"),
    (lambda: sparse(lists=ints([[[0, 20]], [[5, -1]], [[2, 1]]])), "outside of the 20 keys"),
    (lambda: sparse(lists=ints([[[0]], [[5]], [[2]]], torch.int64)), "sparse_indices is torch.int64, not int32"),
    (lambda: sparse(sparse_block_size=2), "sparse_block_size=2 is not emulated"),
    (lambda: sparse(layout_kv="BSND"), "is not emulated; TND, PA_BSND are"),
    (lambda: update(12), "D is 12, no multiple of 8"),
    (lambda: torch_npu.npu_transpose_batchmatmul(ones(1, 2, 8), ones(1, 8, 16)), "no multiples of 16"),
    (lambda: torch_npu.npu_moe_gating_top_k(ones(2, 8), 3, k_group=1, group_count=4), "more than two are wanted"),
    (lambda: torch_npu.npu_moe_gating_top_k(ones(2, 8), 2, renorm=1), "renorm=1, not 0"),
    (lambda: torch_npu.npu_moe_gating_top_k_softmax(ones(2, 8), None, 9), "k=9 of 8 experts"),
    (lambda: torch_npu.npu_moe_init_routing_v2(ones(1, 8), ints([[4]]), expert_num=4), "not below 4"),
    (lambda: torch_npu.npu_moe_init_routing_v2(ones(1, 8), ints([[1]], torch.int64), expert_num=4), "not int32"),
    (lambda: grouped(group_list=ints([1, 3])), "group_list is torch.int32, not int64"),
    (lambda: grouped(group_list=ints([1, 2], torch.int64)), "names 3 rows, x has 4"),
    (lambda: grouped(group_list=ints([4], torch.int64), weight=[ones(1, 16, 8)]), "more than one entry"),
    (lambda: grouped(split_item=0), "split_item=0, not 2 or 3"),
    (lambda: grouped(weight=[ones(2, 16, 8, dtype=torch.bfloat16)]), "must have one dtype"),
    (lambda: int8_experts(output_dtype=torch.bfloat16), "scale is torch.float32; output"),
    (lambda: int8_experts(output_dtype=torch.int32), "int32 results have no scales"),
    (lambda: int8_experts(scale=[ones(8, dtype=torch.float32)]), "scale must be [E, N]"),
    (lambda: int8_experts(weight=[ones(2, 16, 8)]), "weight must be int8"),
    (lambda: few_bit_experts(antiquant_offset=None), "antiquant_scale and antiquant_offset must be given"),
    (lambda: few_bit_experts(x=[ones(4, 16, dtype=torch.float32)]), "x has dtype float32"),
    (lambda: few_bit_experts(antiquant_scale=[ones(2, 2, 8, dtype=torch.bfloat16)]), "dtypes must be equal"),
    (lambda: few_bit_experts(antiquant_scale=[ones(2, 16)]), "antiquant_scale is (2, 16), not (2, 8)"),
    (lambda: few_bit_experts(antiquant_offset=[ones(2, 2, 8)]), "antiquant_offset of groups must be zero"),
    (lambda: few_bit_experts(antiquant_scale=[ones(2, 3, 8)], antiquant_offset=[ones(2, 3, 8)]), "3 groups of 16"),
    (lambda: few_bit_experts(antiquant_scale=[ones(2, 16, 8)], antiquant_offset=[ones(2, 16, 8)]), "groups of 1 of a"),
    (lambda: few_bit_experts(weight=[ones(2, 16, 8, dtype=torch.int8)]), "int8 takes a scale for each column"),
    (lambda: swiglu(x=ones(4, 256)), "x is torch.float16; int32 is emulated"),
    (lambda: swiglu(x=ones(4, 192, dtype=torch.int32)), "H is 96, no multiple of 64"),
    (lambda: swiglu(quant_mode=0), "quant_mode=0, not 1 with group_index"),
    (lambda: swiglu(activation_scale=None), "needs both scales"),
    (lambda: swiglu(group_index=ints([1, 4], torch.int64)), "names 5 rows, x has 4"),
    (lambda: swiglu(weight_scale=ones(256, dtype=torch.float32)), "weight_scale is (256,)"),
    (lambda: torch_npu.npu_moe_token_unpermute(ones(2, 8), ints([0, 0])), "must not repeat"),
    (lambda: torch_npu.npu_moe_token_unpermute(ones(2, 8), ints([0, 1], torch.int64)), "not int32"),
    (lambda: torch_npu.npu_top_k_top_p(ones(1, 8), ones(1), ints([1], torch.int64)), "k is torch.int64, not int32"),
    (lambda: torch_npu.npu_top_k_top_p(ones(1, 2000), ones(1), ints([1025])), "from 1 to 1024"),
    (lambda: torch_npu.npu_dynamic_quant(ones(2, 8, dtype=torch.float32)), "float32, not one of"),
    (lambda: torch_npu.npu_dynamic_quant(ones(8)), "more than one dimension"),
    (lambda: torch_npu.npu_dynamic_quant(ones(2, 8), dst_type=torch.float8_e4m3fn), "is not emulated; int8 is"),
    (lambda: scaled(x1=ones(3, 16)), "int8 is emulated"),
    (lambda: scaled(x1=ones(0, 16, dtype=torch.int8)), "must not be empty"),
    (lambda: scaled(scale=ones(1, 8, dtype=torch.float32)), "scale is (1, 8), not [1] or [8]"),
    (lambda: scaled(pertoken_scale=None), "wants pertoken_scale"),
    (lambda: scaled(pertoken_scale=ones(3)), "not float32"),
    (lambda: scaled(bias=ones(8)), "bias is torch.float16 for an output of"),
    (lambda: scaled(bias=ones(8, dtype=torch.bfloat16)), "bias is bfloat16 for an output of"),
    (lambda: scaled(output_dtype=torch.float32), "is not emulated"),
    (lambda: weight_only(x=ones(3, 64, dtype=torch.float32)), "x has dtype float32"),
    (lambda: weight_only(x=ones(0, 64)), "must not be empty"),
    (lambda: weight_only(x=ones(1, 3, 64)), "3 and 2 dimensions, not 2"),
    (lambda: weight_only(weight=ones(64, 1, dtype=torch.int32)), "int8 is emulated"),
    (lambda: weight_only(weight=ones(32, 8, dtype=torch.int8)), "(3, 64) @ (32, 8)"),
    (lambda: weight_only(antiquant_scale=ones(2, 8, dtype=torch.bfloat16)), "dtypes must be equal"),
    (lambda: weight_only(antiquant_offset=ones(2, 8, dtype=torch.bfloat16)), "dtypes must be equal"),
    (lambda: weight_only(antiquant_offset=ones(1, 8)), "antiquant_offset is (1, 8)"),
    (lambda: weight_only(antiquant_group_size=16), "antiquant_group_size=16 for K of 64"),
    (lambda: weight_only(antiquant_group_size=64), "antiquant_group_size=64 for K of 64"),
    (lambda: weight_only(antiquant_group_size=0), "antiquant_scale is (2, 8), not one of"),
    (lambda: weight_only(bias=ones(8, dtype=torch.float32)), "bias is torch.float32; for an x of torch.float16"),
    (lambda: weight_only(bias=ones(16)[::2]), "bias must be contiguous"),
    (lambda: quantized(torch.float16), "scales cannot be of that dtype"),
    (lambda: quantized(torch.bfloat16), "dtypes must be equal"),
    (lambda: quantized(scales=ones(3, dtype=torch.float32)), "[1] or the axis's size"),
    (lambda: quantized(axis=2), "axis=2 of 2 dimensions"),
    (lambda: quantized(dtype=torch.quint8), "is not emulated; qint8 is"),
    (lambda: torch_npu.npu_format_cast(ones(8), 29), "needs two dimensions"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_the_documentation_excludes_is_refused(number: int) -> None:
    call, rule = REFUSED[number]
    with pytest.raises(emulated_npu.Refused, match=r"the emulated NPU refuses npu::\w+: .*" + re.escape(rule)):
        call()
    assert emulated_npu.calls() == {}, "a refused call is not counted"


@pytest.mark.parametrize(
    "call", [attend, listed, sparse, scatter, grouped, scaled, weight_only, quantized, lambda: update(16)]
)
def test_the_calls_that_are_changed_are_right(call: Callable[[], Any]) -> None:
    call()
    assert sum(emulated_npu.calls().values()) == 1


def test_two_rules_can_be_waived_for_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMU_NPU_WAIVE", "float32,head_size")
    assert attend(query=(4, 2, 32), dtype=torch.float32)[0].dtype == torch.float32
    with pytest.raises(emulated_npu.Refused, match="block_size=24"):
        attend(block_size=24)


def test_tensors_of_the_cpu_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"npu::npu_rms_norm got cpu, npu:0"):
        torch_npu.npu_rms_norm(ones(2, 8), torch.ones(8, dtype=HALF))
