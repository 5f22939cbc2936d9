"""Each emulated kernel gives the shapes and dtypes of the wheel's own Meta kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from emulated_npu import kernels

HALF, SINGLE = torch.float16, torch.float32
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
Case = tuple[str, tuple[Any, ...], dict[str, Any]]


def ones(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def attention(version: int, layout: str, lse: bool, **more: Any) -> Case:
    """Two sequences of four queries and keys, two heads of 128."""
    shape = {"BSH": (2, 4, 256), "BSND": (2, 4, 2, 128)}.get(layout, (2, 2, 4, 128))
    packed = layout in ("TND", "TND_NTD", "NTD_TND")
    if packed:
        shape = (2, 8, 128) if layout == "NTD_TND" else (8, 2, 128)
    query = ones(*shape)
    names = ("actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "softmax_lse_flag")
    if version == 2:
        names = ("actual_seq_qlen", "actual_seq_kvlen", "num_query_heads", "return_softmax_lse")
    ends = [4, 8] if packed else None
    given = dict(zip(names, (ends, ends, 2, lse), strict=True))
    name = "npu_fused_infer_attention_score" + ("_v2" if version == 2 else "")
    return name, (query, query, query), {**given, "input_layout": layout, **more}


def paged(heads_first: bool) -> Case:
    cache = ones(3, 2, 16, 128) if heads_first else ones(3, 16, 256)
    arguments = {
        "actual_seq_lengths": [1, 4], "actual_seq_lengths_kv": [16, 3], "block_table": ints([1], [2]), "num_heads": 4,
        "num_key_value_heads": 2, "input_layout": "TND", "block_size": 16, "softmax_lse_flag": True,
    }  # fmt: skip
    return "npu_fused_infer_attention_score", (ones(4, 4, 128), cache, cache), arguments


def fusion(layout: str) -> Case:
    shape = {"TND": (6, 4, 16), "BSND": (2, 3, 4, 16), "BNSD": (2, 4, 3, 16)}[layout]
    ends = {"actual_seq_qlen": [2, 6], "actual_seq_kvlen": [2, 6]} if layout == "TND" else {}
    return "npu_fusion_attention", (*(ones(*shape),) * 3, 4, layout), ends


def routing(**more: Any) -> Case:
    arguments = {"expert_num": 4, "expert_tokens_num_flag": True, "active_expert_range": [0, 4], "quant_mode": -1}
    return "npu_moe_init_routing_v2", (ones(3, 16), ints([0, 1], [2, 1], [1, 0])), {**arguments, **more}


def experts(x: torch.Tensor, weight: torch.Tensor, **more: Any) -> Case:
    arguments = {"group_list": ints(1, 3, dtype=torch.int64), "split_item": 2, "group_type": 0, "group_list_type": 1}
    return "npu_grouped_matmul", ([x], [weight]), {**arguments, **more}


def few_bit_experts(weight: torch.Tensor) -> Case:
    return experts(ones(4, 16), weight, antiquant_scale=[ones(2, 8)], antiquant_offset=[ones(2, 8)])


def int8_experts(**more: Any) -> Case:
    return experts(ones(4, 16, dtype=INT8), ones(2, 16, 8, dtype=INT8), **more)


def latent_cache(output: bool) -> Case:
    arguments = (
        ones(2, 1, 1, 576), ones(512), ones(2, 1, 1, 64), ones(2, 1, 1, 64), ints(3, 9, dtype=torch.int64),
        ones(2, 16, 1, 64), ones(2, 16, 1, 512),
    )  # fmt: skip
    return "npu_kv_rmsnorm_rope_cache", arguments, {"cache_mode": "PA", "is_output_kv": output}


INT8 = torch.int8
CASES: list[Case] = [
    ("npu_rms_norm", (ones(2, 3, 8), ones(8)), {}),
    ("npu_rms_norm", (ones(2, 3, 8), ones(3, 8)), {}),
    ("npu_add_rms_norm", (ones(2, 3, 8), ones(2, 3, 8), ones(8)), {}),
    ("npu_gemma_rms_norm", (ones(2, 3, 8), ones(8)), {}),
    ("npu_layer_norm_eval", (ones(2, 3, 8), [8], ones(8), ones(8)), {}),
    ("npu_swiglu", (ones(2, 3, 8),), {}),
    ("npu_swiglu", (ones(2, 4, 8), 1), {}),
    ("npu_geglu", (ones(2, 8),), {}),
    ("npu_clipped_swiglu", (ones(2, 3, 8),), {}),
    ("npu_gelu", (ones(2, 8),), {"approximate": "tanh"}),
    ("npu_fast_gelu", (ones(2, 8),), {}),
    ("npu_silu", (ones(2, 8),), {}),
    ("npu_rotary_mul", (ones(1, 3, 2, 8), ones(1, 3, 1, 8), ones(1, 3, 1, 8)), {}),
    ("npu_apply_rotary_pos_emb", (ones(1, 3, 2, 64), *(ones(1, 3, 1, 64) for _ in range(3))), {}),
    ("npu_interleave_rope", (ones(2, 3, 1, 64), ones(2, 1, 1, 64), ones(2, 1, 1, 64)), {}),
    ("npu_mrope", (ints(0, 1), ones(2, 64), ones(2, 32), ones(4, 32), 32), {}),
    ("npu_scatter_pa_kv_cache", (ones(2, 2, 16), ones(2, 2, 16), *(ones(3, 4, 2, 16) for _ in range(2)), ints(1, 2)),
     {"cache_mode": "Norm"}),
    ("npu_scatter_nd_update_", (ones(4, 8), ints([1], [3]), ones(2, 8)), {}),
    *(attention(version, layout, lse) for version in (1, 2) for layout in ("BSH", "BSND", "BNSD", "TND")
      for lse in (False, True)),
    *(attention(version, layout, False) for version in (1, 2) for layout in ("BNSD_BSND", "TND_NTD", "NTD_TND")
      if layout != "TND_NTD"),
    attention(2, "TND", True, learnable_sink=ones(2, dtype=torch.bfloat16)),
    paged(heads_first=False),
    paged(heads_first=True),
    *(fusion(layout) for layout in ("TND", "BSND", "BNSD")),
    ("npu_attention_update", ([ones(3, dtype=torch.float32)] * 2, [ones(3, 16)] * 2, 1), {}),
    latent_cache(output=True),
    latent_cache(output=False),
    ("npu_transpose_batchmatmul", (ones(5, 2, 16), ones(2, 16, 32)), {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]}),
    ("npu_linear", (ones(3, 16), ones(8, 16), ones(8)), {}),
    ("npu_moe_gating_top_k", (ones(3, 8), 2), {"out_flag": True}),
    ("npu_moe_gating_top_k", (ones(3, 8), 2), {}),
    ("npu_moe_gating_top_k_softmax", (ones(3, 8), None, 2), {}),
    *(routing(expert_tokens_num_type=kind) for kind in (0, 1, 2)),
    routing(active_num=6, row_idx_type=1, expert_tokens_num_type=1),
    routing(active_num=4, expert_tokens_num_type=1),
    routing(quant_mode=1, expert_tokens_num_type=1),
    ("npu_moe_token_permute", (ones(3, 16), ints([0, 1], [2, 1], [1, 0])), {}),
    ("npu_moe_token_unpermute", (ones(6, 16), ints(*range(6)), ones(3, 2)), {}),
    ("npu_moe_finalize_routing", (ones(6, 16), ones(3, 16), None, None, ones(3, 2), ints(*range(6)), None), {}),
    experts(ones(4, 16), ones(2, 16, 8)),
    ("npu_grouped_matmul", ([ones(4, 16), ones(2, 16)], [ones(16, 8), ones(16, 8)]), {"group_type": -1}),
    int8_experts(output_dtype=torch.int32),
    int8_experts(output_dtype=HALF, scale=[ones(2, 8, dtype=SINGLE)], per_token_scale=[ones(4, dtype=SINGLE)]),
    few_bit_experts(ones(2, 16, 8, dtype=INT8)),
    few_bit_experts(ones(2, 16, 1, dtype=torch.int32)),
    few_bit_experts(ones(2, 8, 2, dtype=torch.int32).transpose(1, 2)),
    ("npu_dequant_swiglu_quant", (ones(4, 256, dtype=torch.int32),),
     {"weight_scale": ones(2, 256, dtype=SINGLE), "activation_scale": ones(4, 1, dtype=SINGLE), "quant_mode": 1,
      "group_index": ints(1, 3, dtype=torch.int64), "activate_left": True}),
    ("npu_grouped_matmul.List", ([ones(4, 16)], [ones(16, 8), ones(16, 8)]), {"group_list": [1, 4], "split_item": 3}),
    ("npu_top_k_top_p", (ones(2, 8), ones(2), ints(2, 3)), {}),
    ("npu_dynamic_quant", (ones(2, 3, 8),), {}),
    ("npu_quant_matmul", (ones(3, 16, dtype=INT8), ones(16, 8, dtype=INT8), ones(8, dtype=torch.float32)),
     {"pertoken_scale": ones(3, dtype=torch.float32), "output_dtype": torch.bfloat16}),
    ("npu_weight_quant_batchmatmul", (ones(3, 64), ones(64, 8, dtype=INT8), ones(2, 8)), {"antiquant_group_size": 32}),
    ("npu_weight_quant_batchmatmul", (ones(3, 64), ones(8, 64, dtype=INT8).t(), ones(8)), {}),
    ("npu_lightning_indexer", (ones(3, 4, 128), ones(2, 16, 1, 128), ones(3, 4)),
     {"actual_seq_lengths_query": ints(1, 3), "actual_seq_lengths_key": ints(5, 9), "block_table": ints([0], [1]),
      "layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": 8, "sparse_mode": 3}),
    ("npu_sparse_flash_attention",
     (ones(3, 4, 512), ones(2, 16, 1, 512), ones(2, 16, 1, 512), ints(*[[[0, 1, -1]]] * 3), 0.1),
     {"block_table": ints([0], [1]), "actual_seq_lengths_query": ints(1, 3), "actual_seq_lengths_kv": ints(5, 9),
      "query_rope": ones(3, 4, 64), "key_rope": ones(2, 16, 1, 64), "layout_query": "TND", "layout_kv": "PA_BSND",
      "sparse_mode": 3, "attention_mode": 2}),
    ("npu_quantize", (ones(3, 16, dtype=torch.float32), ones(1, dtype=torch.float32), None, torch.qint8, -1, True), {}),
]  # fmt: skip


def described(result: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(leaf.dtype, tuple(leaf.shape)) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def called(case: Case, place: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    name, args, kwargs = tree_map(lambda x: place(x) if isinstance(x, torch.Tensor) else x, case)
    return getattr(torch_npu, name.partition(".")[0])(*args, **kwargs)


@pytest.mark.parametrize("case", CASES, ids=[f"{name}-{number}" for number, (name, *_) in enumerate(CASES)])
def test_the_result_is_what_the_meta_kernel_says(case: Case) -> None:
    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="npu")

    with FakeTensorMode():
        expected = called(case, fake)
    assert described(called(case, torch.Tensor.npu)) == described(expected)


def test_every_kernel_has_a_case() -> None:
    without_meta = {"npu_format_cast"}
    assert set(kernels._kernels) - without_meta == {name for name, *_ in CASES}
