"""Quantized experts without an engine: the method that a layer gets, the parameters it loads, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from single_layers import MIXTURE, mixture
from torch import nn
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

import quantized_mixture
from fl_dispatch import (
    BackendImplKind,
    OpImpl,
    SelectionPolicy,
    get_default_manager,
    policy_context,
    reset_default_manager,
)
from fl_dispatch.devices import ASCEND
from fl_dispatch.hosting.quantized import experts, layers, orders
from fl_dispatch.ops import OPERATORS
from quantized_checkpoints import SCHEMES
from vllm_fl.quantization import expert_method as methods
from vllm_fl.quantization.configs import AWQConfigFL, CompressedTensorsConfigFL, Fp8ConfigFL, GPTQConfigFL

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CONFIGS: dict[str, Any] = {
    "gptq": GPTQConfigFL,
    "awq": AWQConfigFL,
    "fp8": Fp8ConfigFL,
    "compressed-tensors": CompressedTensorsConfigFL,
}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}


def compressed(weights: Any, inputs: Any, form: str = "pack-quantized", **more: Any) -> Any:
    """A configuration of compressed-tensors with one scheme for all layers."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return CompressedTensorsConfigFL.from_config({"format": form, "config_groups": groups, "ignore": [], **more})


@pytest.mark.parametrize(
    ("form", "weights", "inputs", "named"),
    [
        (
            "int-quantized",
            {**CHANNEL, "strategy": "tensor"},
            {**TOKEN, "type": "float", "strategy": "tensor", "dynamic": False},
            r"weights of 8 bits \(int, tensor\) for inputs of 8 bits \(float, tensor\) with scales of the checkpoint",
        ),
        (
            "float-quantized",
            {**CHANNEL, "type": "float"},
            None,
            r"weights of 8 bits \(float, channel\) for inputs as they are",
        ),
        (
            "float-quantized",
            {**CHANNEL, "type": "float", "strategy": "block", "block_structure": [64, 128]},
            {**TOKEN, "type": "float", "strategy": "group", "group_size": 128},
            r"weights of 8 bits \(float, blocks of 64 x 128\) for inputs of 8 bits \(float, groups of 128\)",
        ),
        (
            "int-quantized",
            W4,
            TOKEN,
            r"weights of 4 bits \(int, groups of 32\) for inputs of 8 bits \(int, token\)",
        ),
        (
            "pack-quantized",
            {**W4, "num_bits": 2},
            None,
            r"weights of 2 bits \(int, groups of 32\) for inputs as they are",
        ),
    ],
)
def test_a_scheme_of_experts_is_named(form: str, weights: Any, inputs: Any, named: str) -> None:
    config = compressed(weights, inputs, form)
    with pytest.raises(
        ValueError, match=f"vllm_fl does not support experts with {named} in '{form}' of compressed-tensors .* yet"
    ):
        mixture(config)


def test_experts_whose_products_differ_are_refused() -> None:
    groups = {
        "group_0": {"targets": [r"re:.*down_proj"], "weights": CHANNEL, "input_activations": TOKEN},
        "group_1": {"targets": ["Linear"], "weights": W4, "input_activations": None},
    }
    config = CompressedTensorsConfigFL.from_config({"format": "pack-quantized", "config_groups": groups, "ignore": []})
    with pytest.raises(ValueError, match=rf"experts with products that differ in their scheme \({MIXTURE}\) yet"):
        mixture(config)


def test_experts_of_other_kinds_of_fp8_and_awq_are_refused() -> None:
    for kind, config, named in (
        (Fp8ConfigFL, {**FP8, "weight_block_size": [64, 128]}, r"blocks of 64 x 128\) .* in fp8 "),
        (Fp8ConfigFL, {**FP8, "store_dtype": "mxfp4"}, "stored as 'mxfp4' in 'fp8'"),
        (AWQConfigFL, {**AWQ, "zero_point": False}, "'awq' without zero points"),
        (AWQConfigFL, {**AWQ, "group_size": -1}, "experts quantized by 'awq' without groups"),
    ):
        with pytest.raises(ValueError, match=f"vllm_fl does not support .*{named}.* yet"):
            mixture(kind.from_config(config))


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


NAMED = [f"{MIXTURE}.{number}.{name}" for number in range(2) for name in ("gate_proj", "up_proj", "down_proj")]


@pytest.mark.parametrize(
    ("config", "left"),
    [
        (Fp8ConfigFL.from_config({**FP8, "ignored_layers": NAMED}), True),
        (Fp8ConfigFL.from_config({**FP8, "ignored_layers": ["model.layers.1.mlp.experts", "lm_head"]}), False),
        (GPTQConfigFL.from_config({**GPTQ, "dynamic": {r"-:.*\.mlp\.experts": {}}}), True),
        (GPTQConfigFL.from_config({**GPTQ, "dynamic": {r"-:.*\.mlp\.gate$": {}}}), False),
        (AWQConfigFL.from_config({**AWQ, "modules_to_not_convert": ["layers.0.mlp"]}), True),
        (AWQConfigFL.from_config({**AWQ, "modules_to_not_convert": ["layers.1.mlp", "lm_head"]}), False),
        (compressed(W4, None, ignore=NAMED), True),
        (compressed(W4, None, ignore=[r"re:.*mlp\.experts.*"]), True),
        (compressed(W4, None, ignore=[name.replace("layers.0", "layers.1") for name in NAMED]), False),
    ],
    ids=lambda value: type(value).__name__.removesuffix("ConfigFL") if not isinstance(value, bool) else str(value),
)
def test_experts_that_a_checkpoint_leaves_as_they_are_are_not_quantized(config: Any, left: bool) -> None:
    layer = mixture(config)
    assert isinstance(layer.quant_method, UnquantizedFusedMoEMethod if left else methods.QuantizedMethod)
    assert hasattr(layer, "w13_weight") == (left or isinstance(config, Fp8ConfigFL))


@pytest.mark.parametrize(
    ("hidden", "inner", "ranks", "named"),
    [
        (256, 768, 4, "192 elements on a rank, not a multiple of a group's 128"),
        (256, 1408, 2, "704 elements on a rank, not a multiple of a group's 128"),
        (192, 256, 1, "192 elements on a rank, not a multiple of a group's 128"),
    ],
)
@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors"])
def test_groups_that_ranks_would_divide_are_refused(kind: str, hidden: int, inner: int, ranks: int, named: str) -> None:
    config = {
        "gptq": GPTQConfigFL.from_config({**GPTQ, "group_size": 128}),
        "awq": AWQConfigFL.from_config({**AWQ, "group_size": 128}),
        "compressed-tensors": compressed({**W4, "group_size": 128}, None),
    }[kind]
    with pytest.raises(ValueError, match=rf"vllm_fl does not support experts with {named} \({MIXTURE}\) yet"):
        mixture(config, hidden=hidden, inner=inner, tp_size=ranks)
    whole = mixture(config, hidden=256, inner=256 * ranks, tp_size=ranks)
    assert whole.intermediate_size_per_partition == 256


def test_words_that_ranks_would_divide_are_refused() -> None:
    config = GPTQConfigFL.from_config({**GPTQ, "group_size": -1})
    with pytest.raises(ValueError, match=rf"20 elements on a rank, not a multiple of a word's 8 \({MIXTURE}\) yet"):
        mixture(config, inner=40, tp_size=2)


@pytest.mark.parametrize("without", [("w2_input_scale", 1), ("w13_input_scale", 0), ("w2_weight_scale", 0), None])
def test_a_scale_that_the_checkpoint_lacks_is_noticed(without: tuple[str, int] | None) -> None:
    layer = mixture(Fp8ConfigFL.from_config({**FP8, "activation_scheme": "static"}))
    for name, parameter in layer.named_parameters(recurse=False):
        value = torch.full((64, 64), 0.5) if name.endswith("weight") else torch.tensor(0.25)
        for shard in ("w1", "w3") if name.startswith("w13") else ("w2",):
            for expert in range(2):
                if (name, expert) != without:
                    layer.weight_loader(parameter, value.to(parameter.dtype), name, shard, expert)
    if without is not None:
        with pytest.raises(ValueError, match=f"the checkpoint has no '{without[0]}' for a layer that it quantizes"):
            layer.quant_method.process_weights_after_loading(layer)
    else:
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.w13_input_scale.tolist() == layer.w2_input_scale.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("scheme", quantized_mixture.EXPERTS)
def test_each_expert_computes_with_the_weights_that_its_checkpoint_stands_for(scheme: str, rank: int | None) -> None:
    """``rank``: of two that share each expert."""
    parallel = {} if rank is None else {"tp_size": 2, "tp_rank": rank}
    size, mine = 256, slice(None) if rank is None else slice(rank * 128, (rank + 1) * 128)
    said, generator = SCHEMES[scheme], torch.Generator().manual_seed(0)
    config = CONFIGS[said.config["quant_method"]].from_config(dict(said.config))
    layer = mixture(config, hidden=size, inner=size, **parallel)
    held, shards = [], {"w1": "w13", "w3": "w13", "w2": "w2"}
    for expert in range(2):
        weights = {}
        for shard, target in shards.items():
            stored, weights[shard] = said.write(torch.randn((size, size), generator=generator))
            for suffix, value in stored.items():
                if suffix != "g_idx":  # vLLM's models drop it
                    name = f"{target}_{suffix}"
                    layer.weight_loader(getattr(layer, name), value, name, shard, expert)
        held.append(weights)
    layer.quant_method.process_weights_after_loading(layer)
    change = said.rows or (lambda rows: rows)
    x = torch.randn(5, size, generator=generator)
    for expert, weights in enumerate(held):
        rows = change(x)
        between = nn.functional.silu(rows @ weights["w1"][mine].t()) * (rows @ weights["w3"][mine].t())
        expected = change(between) @ weights["w2"][:, mine].t()
        routing = (torch.ones(5, 1), torch.full((5, 1), expert, dtype=torch.int32), "silu", False, None)
        got = layer.quant_method.fl_kernel.apply_experts(layer, x, *routing, None)
        assert (got - expected).norm() <= 0.02 * expected.norm()  # a step of quantized inputs may turn


def test_quantized_experts_of_gpt_oss_are_refused() -> None:
    with pytest.raises(
        ValueError, match=rf"quantized experts that GptOssRoutedExperts loads in a way of its own \({MIXTURE}\) yet"
    ):
        mixture(compressed(W4, None), kind=GptOssRoutedExperts)
    left = mixture(compressed(W4, None, ignore=NAMED), kind=GptOssRoutedExperts)
    assert isinstance(left.quant_method, UnquantizedFusedMoEMethod)


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
    layer = mixture(GPTQConfigFL.from_config(GPTQ), **parallel)
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
        Fp8ConfigFL.from_config({**FP8, "activation_scheme": "static"}),
        GPTQConfigFL.from_config(GPTQ),
        AWQConfigFL.from_config(AWQ),
        compressed(CHANNEL, TOKEN, "int-quantized"),
        compressed({**W4, "symmetric": False}, None),
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
    config = Fp8ConfigFL.from_config({**FP8, "activation_scheme": "static"})
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


def test_experts_in_fp8_are_refused_on_a_chip_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "detect_device", lambda: ASCEND)
    floats = compressed({**CHANNEL, "type": "float"}, {**TOKEN, "type": "float"}, "float-quantized")
    blocks = Fp8ConfigFL.from_config({**FP8, "weight_block_size": [32, 32]})
    for config in (floats, blocks, Fp8ConfigFL.from_config(FP8)):
        with pytest.raises(
            ValueError, match=r"vllm_fl does not support these experts \(ascend has no float8_e4m3fn\) yet"
        ):
            mixture(config)
    assert isinstance(mixture(GPTQConfigFL.from_config(GPTQ)).quant_method, methods.QuantizedMethod)


@pytest.mark.parametrize(
    ("targets", "refused"),
    [(["Linear"], True), ([r"re:.*experts.*down_proj"], True), ([r"re:.*self_attn\.o_proj"], False)],
)
def test_experts_whose_rows_are_transformed_are_refused(targets: list[str], refused: bool) -> None:
    applied = [{"targets": targets, "location": "input", "ignore": []}]
    transforms = {"config_groups": {"one": {"type": "hadamard", "apply": applied}}}
    config = compressed(W4, None, transform_config=transforms)
    if refused:
        with pytest.raises(ValueError, match=rf"experts with transformed inputs or outputs \({MIXTURE}\) yet"):
            mixture(config)
    else:
        assert isinstance(mixture(config).quant_method, methods.QuantizedMethod)
