"""A quantized layer that the operators cannot compute is refused: by its kernel, its method, or its configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.scalar_type import scalar_types

from fl_dispatch.hosting.quantized import experts, orders
from vllm_fl.quantization import kernels
from vllm_fl.quantization.configs import AWQConfigFL, CompressedTensorsConfigFL, Fp8ConfigFL, GPTQConfigFL

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.mark.parametrize("layer", [kernels.Fp8Layer, kernels.Fp8WeightLayer])
def test_scales_of_fp8_are_a_columns_or_a_weights(layer: type[kernels.VllmKernel]) -> None:
    answers = {key: layer.can_implement(SimpleNamespace(weight_quant_key=key))[0] for key in (  # type: ignore[attr-defined]
        kFp8StaticTensorSym, kFp8StaticChannelSym, kFp8Static128BlockSym,
    )}  # fmt: skip
    assert list(answers.values()) == [True, True, False]


def test_scales_that_are_neither_are_not_taken_for_some() -> None:
    assert orders.scale_of_columns(torch.ones(1), [4, 4]).shape == (8, 1)
    assert orders.scale_of_columns(torch.tensor([1.0, 2.0]), [1, 2]).flatten().tolist() == [1, 2, 2]
    with pytest.raises(ValueError, match="6 scales for 8 columns of 2 merged layers"):
        orders.scale_of_columns(torch.ones(2, 3), [4, 4])


@pytest.mark.parametrize(("shape", "fits"), [((64, 48), True), ((60, 48), False), ((64, 44), False)])
def test_packed_weights_fill_whole_words(shape: tuple[int, int], fits: bool) -> None:
    asked = SimpleNamespace(
        weight_type=scalar_types.uint4b8, partition_weight_shape=shape, group_size=-1, zero_points=False
    )
    assert kernels.PackedLayer.can_implement(asked)[0] == fits


def test_a_quantized_head_is_refused_by_name() -> None:
    head = ParallelLMHead.__new__(ParallelLMHead)
    nn.Module.__init__(head)
    GPTQConfigFL.from_config({**GPTQ, "lm_head": False}).get_quant_method(head, "lm_head")
    with pytest.raises(ValueError, match=r"vllm_fl does not support a quantized head yet \(lm_head\)"):
        GPTQConfigFL.from_config({**GPTQ, "lm_head": True}).get_quant_method(head, "lm_head")


# ---- experts


PREFIX = "model.layers.0.mlp.experts"
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}


def mixture() -> Any:
    """A layer of experts as far as configurations look at it."""
    layer = RoutedExperts.__new__(RoutedExperts)
    nn.Module.__init__(layer)
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
    layer.moe_config = None
    return layer


@pytest.mark.parametrize(
    ("form", "weights", "inputs", "named"),
    [
        (
            "int-quantized",
            {**CHANNEL, "strategy": "tensor"},
            {**TOKEN, "strategy": "tensor", "dynamic": False},
            r"weights of 8 bits \(int, tensor, int-quantized\) and inputs of 8 bits with a scale of the checkpoint",
        ),
        (
            "float-quantized",
            {**CHANNEL, "type": "float"},
            None,
            r"weights of 8 bits \(float, channel, float-quantized\) and inputs as they are",
        ),
        (
            "float-quantized",
            {**CHANNEL, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            {**TOKEN, "type": "float", "strategy": "group", "group_size": 128},
            r"weights of 8 bits \(float, block, float-quantized\) and inputs of 8 bits with a scale a group",
        ),
        ("int-quantized", W4, TOKEN, r"weights of 4 bits \(int, group, int-quantized\) and inputs of 8 bits"),
        ("pack-quantized", {**W4, "num_bits": 2}, None, r"weights of 2 bits \(int, group, pack-quantized\)"),
    ],
)
def test_a_scheme_of_experts_is_named(form: str, weights: Any, inputs: Any, named: str) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    config = CompressedTensorsConfigFL.from_config({"format": form, "config_groups": groups, "ignore": []})
    with pytest.raises(ValueError, match=f"vllm_fl does not support experts with {named}.* in compressed-tensors yet"):
        config.get_quant_method(mixture(), PREFIX)


def test_experts_whose_products_differ_are_refused() -> None:
    groups = {
        "group_0": {"targets": [r"re:.*down_proj"], "weights": CHANNEL, "input_activations": TOKEN},
        "group_1": {"targets": ["Linear"], "weights": W4, "input_activations": None},
    }
    config = CompressedTensorsConfigFL.from_config({"format": "pack-quantized", "config_groups": groups, "ignore": []})
    with pytest.raises(ValueError, match=rf"experts whose products differ in their scheme yet \({PREFIX}\)"):
        config.get_quant_method(mixture(), PREFIX)


def test_experts_of_other_kinds_of_fp8_and_awq_are_refused() -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}
    for config, named in (
        (Fp8ConfigFL.from_config({**fp8, "weight_block_size": [64, 128]}), r"'fp8' in blocks of 64 x 128 yet"),
        (Fp8ConfigFL.from_config({**fp8, "store_dtype": "mxfp4"}), "'mxfp4' yet"),
        (AWQConfigFL.from_config(awq), "'awq' without zero points yet"),
    ):
        with pytest.raises(ValueError, match=f"vllm_fl does not support experts quantized by {named}"):
            config.get_quant_method(mixture(), PREFIX)


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
