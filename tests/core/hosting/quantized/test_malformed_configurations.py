"""A malformed ``quantization_config`` is refused in a sentence that names key and value, before a host reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fl_dispatch.hosting.quantized import configurations, quark

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"a": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def refused(what: str, remedy: str = "") -> Exception:
    return ValueError(what)


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("gptq", GPTQ),
        ("gptq", {**GPTQ, "dynamic": {"-:.*down.*": {}, r"+:.*gate.*": {"bits": 8}}}),
        ("compressed-tensors", COMPRESSED),
        ("compressed-tensors", {**COMPRESSED, "sparsity_config": None}),
        ("fp8", FP8),
        ("fp8", {**FP8, "weight_block_size": [128, 128]}),
        ("awq", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}),
    ],
)
def test_what_tools_write_passes(method: str, config: Mapping[str, Any]) -> None:
    configurations.check(method, config, refused)


@pytest.mark.parametrize(
    ("method", "config", "said"),
    [
        ("gptq", {key: value for key, value in GPTQ.items() if key != "group_size"}, "no 'group_size'"),
        ("gptq", {**GPTQ, "group_size": None}, "'group_size': None, not a whole number,"),
        ("gptq", {**GPTQ, "bits": "4"}, "'bits': '4', not a whole number,"),
        ("gptq", {**GPTQ, "sym": None}, "'sym': None, not true or false,"),
        ("gptq", {**GPTQ, "dynamic": {"-:(": {}}}, "'dynamic': ('-:(', {}), not an expression with a table,"),
        ("gptq", {**GPTQ, "dynamic": {".*": None}}, "'dynamic': ('.*', None), not an expression with a table,"),
        ("awq", {"quant_method": "awq", "w_bit": "4"}, "'w_bit': '4', not a whole number,"),
        ("compressed-tensors", {**COMPRESSED, "config_groups": [1]}, "'config_groups': [1], not a table,"),
        ("compressed-tensors", {**COMPRESSED, "config_groups": {"g": None}}, "'config_groups.g': None, not a table,"),
        (
            "compressed-tensors",
            {**COMPRESSED, "config_groups": {"g": {"weights": "int"}}},
            "'config_groups.g.weights': 'int', not a table,",
        ),
        ("compressed-tensors", {**COMPRESSED, "sparsity_config": "dense"}, "'sparsity_config': 'dense', not a table,"),
        ("quark", {"global_quant_config": ["fp8"]}, "'global_quant_config': ['fp8'], not a table,"),
        ("quark", {"exclude": "lm_head"}, "'exclude': 'lm_head', not a list of names and expressions,"),
        ("quark", {"exclude": ["re:("]}, "'exclude': ['re:('], not a list of names and expressions,"),
        ("quark", {"exclude": [1]}, "'exclude': [1], not a list of names and expressions,"),
        ("fp8", {**FP8, "quant_method": None}, "'quant_method': None, not a text,"),
        ("fp8", {**FP8, "activation_scheme": "stattic"}, "'activation_scheme': 'stattic', not static or dynamic,"),
        ("fp8", {**FP8, "weight_block_size": [128]}, "'weight_block_size': [128], not two whole numbers,"),
    ],
)
def test_a_malformed_value_is_named_with_its_key(method: str, config: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="quantization_config") as found:
        configurations.check(method, config, refused)
    assert str(found.value) == f"{said} in 'quantization_config'"


TENSORS = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
QUARK: dict[str, Any] = {
    "quant_method": "quark",
    "global_quant_config": {"weight": TENSORS, "input_tensors": TENSORS, "bias": None},
}


def test_a_checkpoint_of_quark_is_read_in_the_words_of_another_format() -> None:
    found = quark.as_compressed({**QUARK, "exclude": ["lm_head"], "layer_quant_config": {}}, refused)
    assert found["ignore"] == ["lm_head"]
    assert found["config_groups"]["group_0"]["input_activations"]["dynamic"] is False


@pytest.mark.parametrize("part", quark.BESIDE)
def test_what_quark_quantizes_beside_weights_and_inputs_is_refused(part: str) -> None:
    config = {**QUARK, "global_quant_config": {**QUARK["global_quant_config"], part: TENSORS}}
    with pytest.raises(ValueError, match=f"^'quark' with '{part}'$"):
        quark.as_compressed(config, refused)


def test_a_malformed_value_of_quark_is_named_too() -> None:
    with pytest.raises(ValueError, match="'exclude': 'lm_head', not a list of names and expressions, in"):
        quark.as_compressed({**QUARK, "exclude": "lm_head"}, refused)


@pytest.mark.parametrize("said", [None, "maybe", 1])
def test_quark_says_by_a_boolean_whether_rows_have_scales_of_their_own(said: object) -> None:
    rows = {**QUARK["global_quant_config"], "input_tensors": {**TENSORS, "is_dynamic": said}}
    with pytest.raises(ValueError, match=f"^'quark' with 'is_dynamic': {said!r} of 'input_tensors'$"):
        quark.as_compressed({**QUARK, "global_quant_config": rows}, refused)
