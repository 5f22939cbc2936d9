"""``fl tune`` measures the products that a quantized checkpoint has, and refuses those that it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fl_dispatch import get_default_manager
from fl_dispatch.errors import DispatchError
from fl_dispatch.evidence.tune.calls import row_calls, tuned_cases
from fl_dispatch.evidence.tune.model import dimensions
from fl_dispatch.evidence.tune.weights import FOUR_BITS, FP8, INT8, Weights
from fl_dispatch.ops import Place

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
    "torch_dtype": "float32",
}
EXPERTS = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def compressed(inputs: Mapping[str, Any] | None, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"0": {"weights": weights, "input_activations": inputs}},
    }


TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token"}
INTS, FLOATS = {**TOKEN, "type": "int"}, {**TOKEN, "type": "float"}
CHECKPOINTS: dict[str, tuple[dict[str, Any], Weights]] = {
    "fp8": ({"quant_method": "fp8"}, Weights(FP8, True)),
    "fp8, static": ({"quant_method": "fp8", "activation_scheme": "static"}, Weights(FP8, True, static=True)),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Weights(FP8, True, block=128)),
    "W8A8 int8": (compressed(INTS, num_bits=8, type="int", strategy="channel"), Weights(INT8, True)),
    "W8A8 fp8": (compressed(FLOATS, num_bits=8, type="float", strategy="channel"), Weights(FP8, True)),
    "W4A16": (compressed(None, num_bits=4, type="int", group_size=128), Weights(FOUR_BITS, False, 128)),
    "W4A16 with zero points": (
        compressed(None, num_bits=4, type="int", group_size=128, symmetric=False),
        Weights(FOUR_BITS, False, 128, zeros=True),
    ),
    "W8A16": (compressed(None, num_bits=8, type="int", strategy="channel"), Weights(INT8, False)),
    "W8A16 fp8": (compressed(None, num_bits=8, type="float", strategy="channel"), Weights(FP8, False)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, Weights(FOUR_BITS, False, 128)),
    "gptq, 8 bits, whole rows": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True},
        Weights(INT8, False),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
        Weights(FOUR_BITS, False, 64, zeros=True),
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_weights_are_read_as_they_are_served(name: str) -> None:
    given, weights = CHECKPOINTS[name]
    assert dimensions({**SIZES, "quantization_config": given}).weights == weights
    assert dimensions({"text_config": {**SIZES, "quantization_config": given}}).weights == weights


@pytest.mark.parametrize("sizes", [SIZES, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_call_of_a_quantized_checkpoint_is_one_that_an_implementation_takes(
    name: str, sizes: Mapping[str, Any]
) -> None:
    given, weights = CHECKPOINTS[name]
    model = dimensions({**sizes, "quantization_config": given})
    products = [call.op_name for call in row_calls(model) if call.label != "router"]
    assert "linear" not in products
    assert "fused_moe" not in products
    wanted = {weights.operator} | ({weights.expert_operator} if sizes is EXPERTS else set())
    place, manager = Place(torch.float32, torch.device("cpu")), get_default_manager()
    for case in tuned_cases(model, place, (1, 3), (), (16,), False, op_names=(*wanted, "quantize")):
        result = manager.call(case.key.op_name, *case.case.make())
        assert all(part.isfinite().all() for part in ([result] if isinstance(result, torch.Tensor) else [result[1]]))
        wanted.discard(case.key.op_name)
    assert not wanted


def test_groups_that_do_not_divide_a_ranks_share_are_one_error() -> None:
    given = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    config = {**SIZES, "intermediate_size": 640, "quantization_config": given}
    with pytest.raises(DispatchError, match="320 elements of a weight's row on a rank are not whole groups of 128"):
        list(row_calls(dimensions(config, tensor_parallel=2)))


def test_a_router_is_not_quantized() -> None:
    model = dimensions({**EXPERTS, "quantization_config": {"quant_method": "fp8"}})
    assert [call.label for call in row_calls(model) if call.op_name == "linear"] == ["router"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"quant_method": "hqq"},
            "quant_method is 'hqq'; fl tune knows the products of awq, compressed-tensors, fp8, gptq",
        ),
        ({"bits": 4}, "quant_method is None"),
        ("fp8", "quant_method is None"),
        ({"quant_method": "gptq", "bits": 3, "sym": True}, "of gptq is not served: ValueError.'3 bits'"),
        ({"quant_method": "fp8", "weight_block_size": [1, 128]}, "of fp8 is not served: .*1 x 128"),
        ({"quant_method": "fp8", "weight_block_size": [-128, -128]}, "of fp8 is not served: .*-128 x -128"),
        ({"quant_method": "awq", "bits": 4, "group_size": float("inf")}, "of awq is not served: OverflowError"),
        (compressed(None, num_bits=4, type="float", group_size=16), "floating point of 4 bits"),
        (compressed(INTS, num_bits=4, type="int"), "are not both symmetric numbers of 8 bits"),
        (compressed(FLOATS, num_bits=8, type="int"), "are not both symmetric numbers of 8 bits"),
        ({"quant_method": "compressed-tensors"}, "of compressed-tensors is not served: KeyError"),
        (compressed(None, num_bits=3), "of compressed-tensors is not served: ValueError.'3 bits'"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "of compressed-tensors is not served"),
    ],
)
def test_what_is_not_known_is_one_error(given: Any, said: str) -> None:
    with pytest.raises(DispatchError, match=said):
        dimensions({**SIZES, "quantization_config": given})
