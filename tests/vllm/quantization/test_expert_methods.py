"""Quantized experts without an engine: the method that a layer gets, the parameters it loads, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from single_layers import made, mixture
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

import e2m1
import gpt_oss
from fl_dispatch import (
    BackendImplKind,
    OpImpl,
    SelectionPolicy,
    get_default_manager,
    policy_context,
    reset_default_manager,
)
from fl_dispatch.hosting.quantized import experts, orders
from fl_dispatch.ops import OPERATORS
from quantized_checkpoints import AWQ, FP8_CONFIG, SCHEMES
from single_quantized import GPTQ4, MIXTURE, NAMED, PACKED, QuantizedExperts
from vllm_fl.quantization import expert_method as methods
from vllm_fl.quantization.configs import Mxfp4ConfigFL

STATIC_FP8 = {**FP8_CONFIG, "activation_scheme": "static"}


class TestExperts(QuantizedExperts):
    """The rules of every host."""


def test_scales_of_experts_that_nobody_loaded_are_noticed() -> None:
    layer, kernel = nn.Module(), experts.Int8Experts()
    for name, shape in (("w13", (2, 8, 4)), ("w2", (2, 4, 4))):
        setattr(layer, f"{name}_weight", nn.Parameter(torch.zeros(shape, dtype=torch.int8), requires_grad=False))
        setattr(layer, f"{name}_weight_scale", nn.Parameter(torch.ones(*shape[:2], 1)))
    kernel.process_weights_after_loading(layer)
    layer.w2_weight_scale.data[1].fill_(orders.UNSET)
    with pytest.raises(ValueError, match="the checkpoint has no 'w2_weight_scale' for a layer that it quantizes"):
        kernel.process_weights_after_loading(layer)


def test_scales_of_experts_are_a_columns_a_parts_or_a_weights() -> None:
    assert orders.scale_of_experts(torch.tensor([1.0, 2.0]), 2).tolist() == [[[1.0], [1.0]], [[2.0], [2.0]]]
    assert orders.scale_of_experts(torch.tensor([[1.0, 2.0]]), 4).flatten().tolist() == [1, 1, 2, 2]
    assert orders.scale_of_experts(torch.arange(4.0).view(1, 4, 1), 4).flatten().tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="3 scales for 9 columns of an expert"):
        orders.scale_of_experts(torch.ones(2, 3), 9)


def test_quantized_experts_of_gpt_oss_are_refused() -> None:
    with pytest.raises(
        ValueError, match=rf"quantized experts that GptOssRoutedExperts loads in a way of its own \({MIXTURE}\) yet"
    ):
        mixture(made(PACKED), kind=GptOssRoutedExperts)
    left = mixture(made({**PACKED, "ignore": NAMED}), kind=GptOssRoutedExperts)
    assert isinstance(left.quant_method, UnquantizedFusedMoEMethod)


def experts_of_gpt_oss(**parallel: int) -> nn.Module:
    """The experts of a layer of gpt-oss in MXFP4, zeros with scales of 2 ** -127."""
    return mixture(Mxfp4ConfigFL.from_config(dict(gpt_oss.MXFP4)), kind=GptOssRoutedExperts, **parallel)


def test_mxfp4_experts_compute_with_the_numbers_that_their_bytes_stand_for() -> None:
    layer, generator = experts_of_gpt_oss(), torch.Generator().manual_seed(0)
    weights = {}
    for name in ("w13", "w2"):
        stored = getattr(layer, f"{name}_weight")
        count, columns, half = stored.shape
        blocks, scales = e2m1.mxfp4(torch.randn((count, columns, 2 * half), generator=generator))
        layer.weight_loader(stored, blocks.flatten(2), f"{name}_weight", None, None)
        layer.weight_loader(getattr(layer, f"{name}_weight_scale"), scales, f"{name}_weight_scale", None, None)
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, inner, columns]
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn((5, weights["w13"].shape[1]), generator=generator)
    for expert in range(2):
        between = nn.functional.silu(x @ weights["w13"][expert][:, : weights["w2"].shape[1]])
        between = between * (x @ weights["w13"][expert][:, weights["w2"].shape[1] :])
        routing = (torch.ones(5, 1), torch.full((5, 1), expert, dtype=torch.int32), "silu", False, None)
        got = layer.quant_method.fl_kernel.apply_experts(layer, x, *routing, None)
        torch.testing.assert_close(got, between @ weights["w2"][expert], rtol=1e-4, atol=1e-3)


def test_mxfp4_experts_with_a_part_of_a_group_on_a_rank_are_refused() -> None:
    with pytest.raises(ValueError, match=r"experts with 48 elements on a rank, not a multiple of a group's 32"):
        mixture(Mxfp4ConfigFL.from_config({}), kind=GptOssRoutedExperts, inner=96, tp_size=2, tp_rank=1)


@pytest.mark.parametrize(("exponent", "dtype"), [(90, torch.float16), (150, torch.float16)])
def test_scales_that_the_models_type_does_not_have_are_refused(exponent: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"does not have scales of .*, which the checkpoint has; serve in bfloat16"):
        orders.scales_of_bytes(torch.tensor([127, exponent], dtype=torch.uint8), dtype)


def test_scales_that_rounding_changes_are_refused_for_a_weight_of_many() -> None:
    """A half type has few exponents, and scales of inputs make those of weights small."""
    scales = torch.linspace(1, 400, 64).view(2, 4, 8).to(torch.float8_e4m3fn)
    for factors in ((1e-5, 1e-5), (1e-5, 1e-9)):
        factor = torch.tensor(factors).view(2, 1, 1)
        exact = scales.float() * factor
        found = orders.scales_of_bytes(scales, torch.bfloat16, factor).float()
        assert (found - exact).norm() < orders.MOST_CHANGE * exact.norm()
        if factors[0] == factors[1]:
            orders.scales_of_bytes(scales, torch.float16, factor)
        else:
            with pytest.raises(ValueError, match="does not have scales of .*; serve in bfloat16"):
                orders.scales_of_bytes(scales, torch.float16, factor)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf")])
def test_a_scale_of_all_numbers_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=rf"'w13_input_scale' has {value:g}, which is no scale"):
        experts_of_gpt_oss().quant_method.fl_kernel._check_factor("w13_input_scale", torch.tensor([1.0, value]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_power_of_two_is_a_scale_of_models_in(dtype: torch.dtype) -> None:
    exponents = torch.arange(255).to(torch.uint8)
    assert torch.equal(orders.scales_of_bytes(exponents, dtype).double(), torch.exp2(exponents.double() - 127))


@pytest.mark.parametrize(
    ("parallel", "added"),
    [
        ({}, True),
        ({"tp_size": 2, "tp_rank": 0}, True),
        ({"tp_size": 2, "tp_rank": 1}, False),
        ({"ep_size": 2, "ep_rank": 1, "use_ep": True}, True),
    ],
    ids=["one rank", "first of two", "second of two", "second of two with whole experts"],
)
def test_one_rank_adds_the_bias_of_the_second_product(parallel: Any, added: bool) -> None:
    layer = mixture(made(GPTQ4), **parallel)
    for name in ("w13_scales", "w2_scales", "w13_qweight", "w2_qweight"):
        getattr(layer, name).data.fill_(1)
    for shard, name, size in (("w1", "w13_bias", 64), ("w3", "w13_bias", 64), ("w2", "w2_bias", 64)):
        for expert in range(2):
            layer.weight_loader(getattr(layer, name), torch.full((size,), 3.0), name, shard, expert)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.w13_bias.flatten().unique().tolist() == [3.0]
    assert (layer.w2_bias == 3.0).any() == added
    assert (layer.w2_bias == 0.0).all() == (not added)


@pytest.mark.parametrize(
    "config",
    [
        made(STATIC_FP8),
        made(GPTQ4),
        made(AWQ),
        made(SCHEMES["compressed-tensors W8A8 int8"].config),
        made(SCHEMES["compressed-tensors W4A16, zero points"].config),
    ],
    ids=["fp8", "gptq", "awq", "int8", "packed"],
)
def test_a_rank_without_experts_adds_nothing(config: Any) -> None:
    layer = mixture(config, count=1, ep_size=2, ep_rank=1, use_ep=True)
    assert layer.local_num_experts == 0
    layer.quant_method.process_weights_after_loading(layer)
    x, ids = torch.ones(3, 64), torch.zeros(3, 1, dtype=torch.int32)
    kernel = layer.quant_method.fl_kernel
    assert not kernel.apply_experts(layer, x, torch.ones(3, 1), ids, "silu", False, layer.expert_map, None).any()


@pytest.fixture
def vendors_experts() -> Iterator[list[str]]:
    """A vendor's experts, which decline the numbers of tokens that a test puts into the list: few, many."""
    declined: list[str] = []

    def supports(hidden_states: torch.Tensor, *others: Any) -> bool | str:
        size = "few" if len(hidden_states) <= 8 else "many"
        return f"{size} tokens" if size in declined else True

    impl = OpImpl(
        "scaled_moe",
        "vendor.some",
        BackendImplKind.VENDOR,
        OPERATORS["scaled_moe"].reference,
        vendor="some",
        supports=supports,
    )
    reset_default_manager()
    get_default_manager().registry.register_impl(impl)
    yield declined
    reset_default_manager()


def load_experts() -> Any:
    """Load a layer of ``scaled_moe``, on a rank without experts; return vLLM's kernel around them."""
    config = made(STATIC_FP8)
    layer = mixture(config, count=1, ep_size=2, ep_rank=1, use_ep=True)
    layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method.moe_kernel


@pytest.mark.parametrize("size", ["few", "many"])
def test_experts_that_the_chosen_kernel_declines_are_refused(size: str, vendors_experts: list[str]) -> None:
    """Without words about them they would wait for the device in each layer."""
    with policy_context(SelectionPolicy(prefer="vendor")):
        load_experts()
        vendors_experts.append(size)
        with pytest.raises(
            ValueError, match=rf"vllm_fl does not support these experts \({size} tokens; {MIXTURE}\) yet"
        ):
            load_experts()


def test_experts_that_wait_anyway_may_leave_some_to_the_reference(vendors_experts: list[str]) -> None:
    """No graph holds the chosen kernel either, as on a CPU."""
    registry = get_default_manager().registry
    (impl,) = (each for each in registry.get_implementations("scaled_moe") if each.impl_id == "vendor.some")
    waiting = replace(impl, impl_id="vendor.waits", properties={"graphs": False}, priority=impl.priority + 1)
    registry.register_impl(waiting)
    vendors_experts.append("few")
    with policy_context(SelectionPolicy(per_op_order=(("scaled_moe", ("impl:vendor.waits", "reference")),))):
        assert load_experts().fused_experts.fl_kernel.fl_operator == "scaled_moe"


@pytest.mark.parametrize("size", ["few", "many"])
def test_experts_that_no_other_kernel_may_compute_are_refused(size: str, vendors_experts: list[str]) -> None:
    """Without words about them the first batch would fail."""
    with policy_context(SelectionPolicy(per_op_order=(("scaled_moe", ("impl:vendor.some",)),))):
        load_experts()
        vendors_experts.append(size)
        with pytest.raises(ValueError, match=rf"does not support these experts \(.*vendor\.some: {size} tokens"):
            load_experts()


@pytest.mark.parametrize(
    ("targets", "refused"),
    [(["Linear"], True), ([r"re:.*experts.*down_proj"], True), ([r"re:.*self_attn\.o_proj"], False)],
)
def test_experts_whose_rows_are_transformed_are_refused(targets: list[str], refused: bool) -> None:
    applied = [{"targets": targets, "location": "input", "ignore": []}]
    transforms = {"config_groups": {"one": {"type": "hadamard", "apply": applied}}}
    config = made({**PACKED, "transform_config": transforms})
    if refused:
        with pytest.raises(ValueError, match=rf"experts with transformed inputs or outputs \({MIXTURE}\) yet"):
            mixture(config)
    else:
        assert isinstance(mixture(config).quant_method, methods.QuantizedMethod)
