"""Emulated kernels against numbers made by hand and plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch_npu

import emulated_npu
from on_chip import Numbers, close, npu


def test_rms_norm_gives_the_norm_and_one_over_rms() -> None:
    y, rstd = torch_npu.npu_rms_norm(npu([[3.0, 4.0]]), npu([2.0, 1.0]), 0.0)
    close(y, [[6 / math.sqrt(12.5), 4 / math.sqrt(12.5)]])
    close(rstd, [[1 / math.sqrt(12.5)]])


def test_gemmas_norm_adds_one_to_the_weight() -> None:
    y, _ = torch_npu.npu_gemma_rms_norm(npu([[3.0, 4.0]]), npu([1.0, 0.0]), 0.0)
    close(y, [[6 / math.sqrt(12.5), 4 / math.sqrt(12.5)]])


def test_add_rms_norm_is_functional() -> None:
    x1, x2 = npu([[1.0, 2.0]]), npu([[2.0, 2.0]])
    y, rstd, total = torch_npu.npu_add_rms_norm(x1, x2, npu([1.0, 1.0]), 0.0)
    close(rstd, [[1 / math.sqrt(12.5)]])
    close(total, [[3.0, 4.0]])
    close(y, [[3 / math.sqrt(12.5), 4 / math.sqrt(12.5)]])
    assert (x1.tolist(), x2.tolist()) == ([[1.0, 2.0]], [[2.0, 2.0]])


def test_activations() -> None:
    close(torch_npu.npu_swiglu(npu([1.0, -2.0, 3.0, 5.0])), [3 / (1 + math.exp(-1)), -10 / (1 + math.exp(2))])
    close(torch_npu.npu_fast_gelu(npu([1.0])), [1 / (1 + math.exp(-1.702))])
    close(torch_npu.npu_gelu(npu([1.0]), approximate="none"), [0.5 * (1 + math.erf(1 / math.sqrt(2)))])
    close(torch_npu.npu_silu(npu([2.0])), [2 / (1 + math.exp(-2))])
    product, gelu = torch_npu.npu_geglu(npu([3.0, 1.0]), approximate=0)
    close(gelu, [0.5 * (1 + math.erf(1 / math.sqrt(2)))])
    close(product, gelu.cpu() * 3)


def test_clipped_swiglu_of_pairs_and_of_halves() -> None:
    expected = [[2 / (1 + math.exp(-1.702 * 2)) * 6, 7 / (1 + math.exp(-1.702 * 7)) * -6]]
    close(torch_npu.npu_clipped_swiglu(npu([[2.0, 5.0, 9.0, -8.0]])), expected)
    close(torch_npu.npu_clipped_swiglu(npu([[2.0, 9.0, 5.0, -8.0]]), interleaved=False), expected)


def test_layer_norm() -> None:
    made = torch_npu.npu_layer_norm_eval(npu([[1.0, 3.0]]), [2], npu([1.0, 2.0]), npu([0.5, 0.0]), 0.0)
    close(made, [[-0.5, 2.0]])


def test_linear_multiplies_with_the_rows_of_the_weight() -> None:
    made = torch_npu.npu_linear(npu([[1.0, 2.0]]), npu([[3.0, 4.0], [5.0, 6.0], [0.0, 1.0]]), npu([0.5, 0.0, 0.0]))
    close(made, [[11.5, 17.0, 2.0]])


def test_rows_are_written_in_place_where_indices_say() -> None:
    rows = npu([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    torch_npu.npu_scatter_nd_update_(rows, torch.tensor([[2], [0]], device="npu"), npu([[7.0, 8.0], [5.0, 6.0]]))
    close(rows, [[5.0, 6.0], [1.0, 1.0], [7.0, 8.0]])


@pytest.mark.parametrize(("mode", "turned"), [("half", [-3.0, -4.0, 1.0, 2.0]), ("interleave", [-2.0, 1.0, -4.0, 3.0])])
def test_rotary_mul(mode: str, turned: list[float]) -> None:
    x = npu([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    cos, sin = torch.full_like(x, 0.5), torch.full_like(x, 10.0)
    made = torch_npu.npu_rotary_mul(x, cos, sin, mode)
    close(made.flatten(), torch.tensor([0.5, 1.0, 1.5, 2.0]) + 10 * torch.tensor(turned))


def test_rotary_embedding_overwrites_query_and_key(normal: Numbers) -> None:
    query, key, cos, sin = normal(3, 2, 64), normal(3, 1, 64), normal(3, 1, 64), normal(3, 1, 64)
    on_chip = query.npu()
    made, _ = torch_npu.npu_apply_rotary_pos_emb(on_chip, key.npu(), cos.npu(), sin.npu(), "TND")
    close(made, query * cos + torch.cat((-query[..., 32:], query[..., :32]), -1) * sin)
    assert torch.equal(on_chip, made)


def test_interleave_rope_turns_pairs_into_halves() -> None:
    x = torch.arange(64.0).to(torch.float16).view(1, 1, 1, 64)
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    made = torch_npu.npu_interleave_rope(x.npu(), one.npu(), zero.npu())
    assert made.flatten().tolist() == [*range(0, 64, 2), *range(1, 64, 2)]
    turned = torch_npu.npu_interleave_rope(x.npu(), zero.npu(), one.npu())
    assert turned.flatten().tolist() == [*(-i for i in range(1, 64, 2)), *range(0, 64, 2)]


def test_mrope_rotates_by_position_and_leaves_the_rest(normal: Numbers) -> None:
    query, cache = normal(2, 48), normal(5, 16)
    made, _ = torch_npu.npu_mrope(npu([4, 1], torch.int64), query.npu(), query.npu(), cache.npu(), 24)
    cos, sin = cache[[4, 1]].chunk(2, -1)
    heads = query.view(2, 2, 24)
    left, right = heads[..., :8], heads[..., 8:16]
    cos, sin = cos[:, None], sin[:, None]
    expected = torch.cat((left * cos - right * sin, right * cos + left * sin, heads[..., 16:]), -1)
    close(made, expected.view(2, 48))


def test_mrope_takes_each_section_from_its_own_position() -> None:
    cache = torch.zeros(4, 16)
    cache[:, :8] = torch.arange(4.0)[:, None]
    positions = npu([[1], [2], [3]], torch.int64)
    query = torch.ones(1, 16).npu()
    made, _ = torch_npu.npu_mrope(positions, query, query, cache.npu(), 16, mrope_section=[2, 3, 3])
    assert made.flatten().tolist() == [1.0] * 2 + [2.0] * 3 + [3.0] * 3 + [1.0] * 2 + [2.0] * 3 + [3.0] * 3


def test_keys_and_values_go_to_their_slots_and_nowhere_else(normal: Numbers) -> None:
    key, value = normal(3, 2, 8), normal(3, 2, 4)
    keys, values = torch.zeros(2, 4, 2, 8).npu(), torch.zeros(2, 4, 2, 4).npu()
    slots = npu([5, -1, 0], torch.int32)
    torch_npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), keys, values, slots, cache_mode="Norm")
    close(keys[1, 1], key[0])
    close(values[0, 0], value[2])
    assert keys.cpu().flatten(2).any(-1).nonzero().tolist() == [[0, 0], [1, 1]]


def test_keys_in_fractal_order(normal: Numbers) -> None:
    key = normal(2, 2, 16, dtype=torch.float16)
    keys = torch.zeros(2, 2, 4, 16, dtype=torch.float16).npu()
    torch_npu.npu_scatter_pa_kv_cache(key.npu(), key.npu(), keys, keys.clone(), npu([6, 1], torch.int32))
    close(keys[1, :, 2], key[0])
    close(keys[0, :, 1], key[1])


def test_the_latent_cache_is_normed_and_rotated(normal: Numbers) -> None:
    kv, gamma = normal(2, 1, 1, 576, dtype=torch.bfloat16), normal(512, dtype=torch.bfloat16)
    cos, sin = normal(2, 1, 1, 64, dtype=torch.bfloat16), normal(2, 1, 1, 64, dtype=torch.bfloat16)
    ropes, latents = (torch.zeros(2, 16, 1, n, dtype=torch.bfloat16, device="npu") for n in (64, 512))
    _, _, k, y = torch_npu.npu_kv_rmsnorm_rope_cache(
        kv.npu(), gamma.npu(), cos.npu(), sin.npu(), npu([17, 3], torch.int64), ropes, latents, epsilon=1e-6,
        cache_mode="PA", is_output_kv=True,
    )  # fmt: skip
    wide = kv[..., :512].float()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma.float()
    close(y, expected, atol=3e-2, rtol=2e-2)
    pairs = kv[..., 512:].float().unflatten(-1, (32, 2))
    halves = torch.cat((pairs[..., 0], pairs[..., 1]), -1)
    turned = torch.cat((-pairs[..., 1], pairs[..., 0]), -1)
    close(k, halves * cos.float() + turned * sin.float(), atol=3e-2, rtol=2e-2)
    assert torch.equal(latents[1, 1, 0], y[0, 0, 0])
    assert torch.equal(ropes[0, 3, 0], k[1, 0, 0])


def test_the_latent_cache_may_have_a_batch_of_its_own(normal: Numbers) -> None:
    kv, gamma = normal(2, 1, 3, 576, dtype=torch.float16), normal(512, dtype=torch.float16)
    cos = torch.ones(2, 1, 3, 64, dtype=torch.float16)
    ropes, latents = (torch.zeros(2, 1, 5, n, dtype=torch.float16, device="npu") for n in (64, 512))
    index = npu([[0, 1, 2], [4, 3, 2]], torch.int64)
    torch_npu.npu_kv_rmsnorm_rope_cache(
        kv.npu(), gamma.npu(), cos.npu(), (cos * 0).npu(), index, ropes, latents, cache_mode="Norm"
    )
    close(ropes[1, 0, 4], torch.cat((kv[1, 0, 0, 512::2], kv[1, 0, 0, 513::2])))
    assert ropes[0, 0, 3:].cpu().count_nonzero() == 0


def test_a_batched_product_comes_transposed(normal: Numbers) -> None:
    x, weight = normal(5, 3, 16), normal(3, 16, 32)
    made = torch_npu.npu_transpose_batchmatmul(x.npu(), weight.npu(), perm_x1=[1, 0, 2], perm_y=[1, 0, 2])
    close(made, torch.einsum("mbk,bkn->mbn", x, weight))


def test_gates_of_softmax_and_of_sigmoid_in_groups() -> None:
    x = torch.log(torch.tensor([[1.0, 5.0, 2.0, 4.0]]))
    weights, experts, _ = torch_npu.npu_moe_gating_top_k(x.npu(), 2)
    close(weights, [[5 / 12, 4 / 12]])
    assert experts.tolist() == [[1, 3]]
    x = torch.tensor([[4.0, 0.0, 0.0, 1.0, 1.0, 1.0]])
    bias = torch.tensor([-1.0, 0.0, 0.0, 0.0, 0.0, 0.5])  # the best two of the second group win, weights are without it
    weights, experts, gates = torch_npu.npu_moe_gating_top_k(
        x.npu(), 2, bias=bias.npu(), k_group=1, group_count=2, group_select_mode=1, norm_type=1, out_flag=True,
        routed_scaling_factor=3.0,
    )  # fmt: skip
    assert experts.tolist() == [[5, 3]]
    close(weights, [[1.5, 1.5]])
    close(gates, torch.sigmoid(x))


def test_row_indices_of_softmax_gates_count_columns_first() -> None:
    x = torch.log(torch.tensor([[1.0, 2.0, 5.0], [4.0, 3.0, 1.0]]))
    weights, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(x.npu(), None, 2)
    close(weights, [[5 / 8, 2 / 8], [4 / 8, 3 / 8]])
    assert (experts.tolist(), rows.tolist()) == ([[2, 1], [0, 1]], [[0, 2], [1, 3]])


def test_experts_one_by_one_are_the_layer(normal: Numbers) -> None:
    """Routing, two products in groups and the way back, against a loop over tokens."""
    x, weight = normal(5, 16), normal(4, 16, 8)
    experts = torch.tensor([[2, 0], [2, 3], [0, 2], [3, 2], [0, 3]], dtype=torch.int32)  # none goes to expert 1
    probs = normal(5, 2).softmax(-1)
    rows, where, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), active_num=10, expert_num=4, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        active_expert_range=[0, 4], quant_mode=-1,
    )  # fmt: skip
    assert counts.tolist() == [3, 0, 4, 3]
    (made,) = torch_npu.npu_grouped_matmul(
        [rows], [weight.npu()], split_item=2, group_type=0, group_list_type=1, group_list=counts
    )
    back = torch_npu.npu_moe_token_unpermute(made, where, probs.npu())
    expected = torch.stack(
        [sum(p * (x[t] @ weight[e]) for e, p in zip(experts[t], probs[t], strict=True)) for t in range(5)]
    )
    close(back, expected)


@pytest.mark.parametrize(("kind", "tokens"), [(0, [3, 3, 5]), (1, [3, 0, 2]), (2, [[0, 3], [2, 2], [0, 0]])])
def test_tokens_of_experts_are_counted_as_asked(kind: int, tokens: list) -> None:
    experts = npu([[0], [2], [0], [2], [0]], torch.int32)
    made = torch_npu.npu_moe_init_routing_v2(
        torch.ones(5, 16, device="npu"), experts, expert_num=3, expert_tokens_num_type=kind,
        expert_tokens_num_flag=True, active_expert_range=[0, 3],
    )  # fmt: skip
    assert made[2].tolist() == tokens


def test_rows_of_experts_elsewhere_are_left_out() -> None:
    x, experts = torch.arange(4.0).repeat(16, 1).t().contiguous(), npu([[3], [1], [0], [2]], torch.int32)
    for kind, rows in ((0, [-1, 0, -1, 1]), (1, [1, 3, -1, -1])):
        made, where, counts, _ = torch_npu.npu_moe_init_routing_v2(
            x.npu(), experts, expert_num=4, expert_tokens_num_type=1, expert_tokens_num_flag=True,
            active_expert_range=[1, 3], row_idx_type=kind,
        )  # fmt: skip
        assert (where.tolist(), counts.tolist(), made[:2, 0].tolist()) == (rows, [1, 1], [1.0, 3.0])


def test_grouped_products_of_lists(normal: Numbers) -> None:
    x, weights = normal(6, 16), [normal(16, 8) for _ in range(3)]
    expected = torch.cat([x[:1] @ weights[0], x[1:4] @ weights[1], x[4:] @ weights[2]])
    ends = npu([1, 4, 6], torch.int64)
    on_chip = [weight.npu() for weight in weights]
    (one,) = torch_npu.npu_grouped_matmul([x.npu()], on_chip, group_list=ends, split_item=3, group_type=0)
    close(one, expected)
    (listed,) = torch_npu.npu_grouped_matmul([x.npu()], on_chip, group_list=[1, 4, 6], split_item=3)
    close(listed, expected)
    several = torch_npu.npu_grouped_matmul([x[:1].npu(), x[1:4].npu(), x[4:].npu()], on_chip, group_type=-1)
    close(torch.cat(several), expected)


def test_permuting_and_finalizing() -> None:
    tokens = npu([[1.0], [2.0], [3.0]])
    made, where = torch_npu.npu_moe_token_permute(tokens, npu([[1, 0], [0, 1], [2, 0]], torch.int64))
    assert (made.flatten().tolist(), where.tolist()) == ([1.0, 2.0, 3.0, 1.0, 2.0, 3.0], [3, 0, 1, 4, 5, 2])
    rows, scales = npu([[10.0], [20.0], [30.0], [40.0]]), npu([[1.0, 0.5], [2.0, 0.25]])
    out = torch_npu.npu_moe_finalize_routing(
        rows, npu([[1.0], [2.0]]), None, npu([[0.0], [4.0]]), scales, npu([0, 1, 2, 3], torch.int32),
        npu([[0, 1], [1, 0]], torch.int32),
    )  # fmt: skip
    assert out.tolist() == [[1 + 10 + 0.5 * 34], [2 + 2 * 24 + 0.25 * 40]]


def test_logits_are_filtered_by_k_and_p() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.4, 0.3, 0.2, 0.1]]))
    made = torch_npu.npu_top_k_top_p(logits.npu(), npu([1.0, 0.65]), npu([2, 4], torch.int32))
    assert made.isfinite().tolist() == [[True, False, True, False], [True, True, False, False]]
    assert torch.equal(made.cpu()[made.cpu().isfinite()], logits[made.cpu().isfinite()])


def test_a_quantized_product_is_near_the_exact_one(normal: Numbers) -> None:
    x, weight = normal(4, 32, dtype=torch.bfloat16), normal(32, 16)
    q, scale = torch_npu.npu_dynamic_quant(x.npu())
    close(scale, x.float().abs().amax(-1) / 127)
    weight_scale = weight.abs().amax(0) / 127
    q_weight = (weight / weight_scale).round().to(torch.int8)
    made = torch_npu.npu_quant_matmul(
        q, q_weight.npu(), weight_scale.npu(), pertoken_scale=scale, output_dtype=torch.bfloat16
    )
    close(made, x.float() @ weight, atol=0.3, rtol=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [0, 32], ids=["columns", "groups"])
def test_a_quantized_weight_is_moved_and_scaled_before_the_product(
    dtype: torch.dtype, group: int, normal: Numbers
) -> None:
    x, numbers = normal(3, 80, dtype=dtype), torch.arange(80 * 16).view(80, 16) % 255 - 127
    shape = (3 if group else 1, 16)  # the last group is shorter
    scale, offset = (normal(*shape).abs() + 0.5).to(dtype), torch.arange(shape[0] * 16).view(shape).to(dtype)
    bias = normal(16, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    made = torch_npu.npu_weight_quant_batchmatmul(
        x.npu(), numbers.t().contiguous().to(torch.int8).npu().t(), scale.npu(), offset.npu(), bias=bias.npu(),
        antiquant_group_size=group,
    )  # fmt: skip
    row = torch.arange(80) // 32 if group else torch.zeros(80, dtype=torch.int64)
    matrix = (numbers + offset.double()[row]) * scale.double()[row]
    close(made, x.double() @ matrix + bias.double(), atol=1.0, rtol=0.01)


def test_experts_of_int8_keep_int32_between_their_products() -> None:
    counts = npu([1, 0, 2], torch.int64)
    x, weight = (
        torch.arange(size).view(shape) % 255 - 127 for size, shape in ((6144, (3, 2048)), (786432, (3, 2048, 128)))
    )
    groups = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": counts}
    (made,) = torch_npu.npu_grouped_matmul(
        [x.to(torch.int8).npu()], [weight.to(torch.int8).npu()], **groups, output_dtype=torch.int32
    )
    exact = torch.cat((x[:1] @ weight[0], x[1:] @ weight[2]))
    assert torch.equal(made.cpu(), exact.to(torch.int32))
    columns, rows = torch.arange(1, 385).view(3, 128) * 1e-9, torch.tensor([1.0, 2.0, 3.0])
    numbers, scale = torch_npu.npu_dequant_swiglu_quant(
        made, weight_scale=columns.npu(), activation_scale=rows.npu(), group_index=counts, activate_left=True,
        quant_mode=1,
    )  # fmt: skip
    left, right = (exact * columns[[0, 2, 2]].double() * rows.double()[:, None]).chunk(2, -1)
    expected = left * left.sigmoid() * right
    close(scale, expected.abs().amax(-1) / 127)
    assert (numbers.cpu() * scale.cpu()[:, None] - expected).abs().amax() <= scale.amax() * 0.51


@pytest.mark.parametrize("kind", ["int8", "int4", "int4 along K", "int4 in groups"])
def test_a_quantized_weight_of_experts_is_moved_and_scaled_before_the_product(kind: str, normal: Numbers) -> None:
    x, numbers = normal(3, 16, dtype=torch.float16), torch.arange(2 * 16 * 24).view(2, 16, 24) % 16 - 8
    groups = 4 if "groups" in kind else 1
    scale, offset = normal(2, groups, 24).abs() + 0.5, normal(2, groups, 24) * (groups == 1)
    scale, offset = (values.half() for values in (scale, offset))
    weight = numbers.to(torch.int8).npu()
    if kind != "int8":
        last = numbers if kind == "int4" else numbers.transpose(1, 2)
        words = (last.unflatten(-1, (-1, 8)) % 16 << torch.arange(8) * 4).sum(-1).to(torch.int32).npu()
        weight = words if kind == "int4" else words.transpose(1, 2)
    given = [values if groups > 1 else values[:, 0].contiguous() for values in (scale, offset)]
    (made,) = torch_npu.npu_grouped_matmul(
        [x.npu()], [weight], antiquant_scale=[given[0].npu()], antiquant_offset=[given[1].npu()], split_item=2,
        group_type=0, group_list=npu([1, 3], torch.int64),
    )  # fmt: skip
    spread = [values.double().repeat_interleave(16 // groups, 1) for values in (scale, offset)]
    matrix = (numbers + spread[1]) * spread[0]
    close(made, torch.cat((x[:1].double() @ matrix[0], x[1:].double() @ matrix[1])), atol=0.05, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_given_scale_divides_rounds_and_cuts_off(dtype: torch.dtype) -> None:
    x = npu([[0.0, 0.75, -0.75, 1.25], [1000.0, -1000.0, 63.5, -64.0]], dtype)
    made = torch_npu.npu_quantize(x, npu([0.5], dtype), None, torch.qint8, -1, True)
    assert made.dtype == torch.int8
    assert made.tolist() == [[0, 2, -2, 2], [127, -128, 127, -128]]
    made = torch_npu.npu_quantize(x, npu([1.0, 0.25, 1.0, 0.5], dtype), None, torch.qint8, axis=1)
    assert made.tolist() == [[0, 3, -1, 2], [127, -128, 64, -128]]


def test_a_format_changes_no_value(normal: Numbers) -> None:
    x = normal(32, 16)
    close(torch_npu.npu_format_cast(x.npu(), 29), x)


def test_every_call_is_counted() -> None:
    for _ in range(3):
        torch_npu.npu_swiglu(torch.ones(4, device="npu"))
    assert emulated_npu.calls() == {"npu_swiglu": 3}


def test_a_kernel_can_be_made_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 4, device="npu")
    right = torch_npu.npu_swiglu(x)
    monkeypatch.setenv("EMU_NPU_WRONG", "npu_swiglu,npu_rms_norm")
    assert not torch.equal(torch_npu.npu_swiglu(x), right)
    assert x.tolist() == [[1.0] * 4] * 2
    monkeypatch.delenv("EMU_NPU_WRONG")
    assert torch.equal(torch_npu.npu_swiglu(x), right)
