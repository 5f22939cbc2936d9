"""The one decision on quantization schemes; ``quantized_served.txt`` says what each host makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_dispatch.hosting.quantized import schemes
from fl_dispatch.hosting.quantized.schemes import Kind, Numbers, Scheme, kind_of

COLUMN, WEIGHT = Numbers(8, "float", "channel"), Numbers(8, "float", "tensor")
TOKEN = Numbers(8, "float", "token", dynamic=True)
FLOAT = Scheme("compressed-tensors", COLUMN, TOKEN, "float-quantized")
INT = Scheme(
    "compressed-tensors", replace(COLUMN, kind="int"), replace(TOKEN, kind="int", per="tensor", dynamic=False), "int"
)
BLOCKS = schemes.fp8("dynamic", [128, 128])
MXFP4 = Scheme("compressed-tensors", Numbers(4, "float", "group", 32), form=schemes.MXFP4_FORM)
NVFP4 = replace(MXFP4, weights=Numbers(4, "float", "tensor_group", 16), form=schemes.NVFP4_FORM)
PACKED = Scheme("compressed-tensors", Numbers(4, "int", "group", 32), form=schemes.PACKED_FORM)
STORED = replace(PACKED, form=schemes.STORED_FORM, inputs=schemes.INT8_ROWS)
MXFP8 = Scheme("compressed-tensors", Numbers(8, "float", "group", 32), form=schemes.MXFP8_FORM)
GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("scheme", "dense", "experts"),
    [
        (FLOAT, Kind.FP8, Kind.FP8),
        (replace(FLOAT, weights=WEIGHT), Kind.FP8, Kind.FP8),
        (replace(FLOAT, inputs=None), Kind.FP8_WEIGHT, Kind.FP8_WEIGHT),
        (replace(FLOAT, inputs=replace(TOKEN, kind="int")), None, None),
        (replace(FLOAT, inputs=replace(TOKEN, bits=4)), None, None),
        (replace(FLOAT, inputs=replace(TOKEN, symmetric=False)), None, None),
        (replace(FLOAT, weights=replace(COLUMN, symmetric=False)), None, None),
        (replace(FLOAT, weights=replace(COLUMN, dynamic=True)), None, None),
        (replace(FLOAT, weights=replace(COLUMN, per="group", group=32)), None, None),
        (MXFP4, Kind.MXFP4, Kind.MXFP4),
        (NVFP4, Kind.NVFP4, Kind.NVFP4),
        (replace(MXFP4, inputs=replace(MXFP4.weights, dynamic=True)), Kind.MXFP4, Kind.MXFP4),
        (replace(NVFP4, inputs=replace(NVFP4.weights, dynamic=True)), Kind.NVFP4, Kind.NVFP4),
        (replace(NVFP4, inputs=NVFP4.weights), None, None),
        (replace(MXFP4, inputs=TOKEN), None, None),
        (replace(MXFP4, form=schemes.NVFP4_FORM), None, None),
        (INT, Kind.INT8, Kind.INT8),
        (replace(INT, inputs=None), None, None),
        (schemes.fp8("dynamic", None), Kind.FP8, Kind.FP8),
        (schemes.fp8("static", None), Kind.FP8, Kind.FP8),
        (BLOCKS, Kind.FP8_BLOCKS, Kind.FP8_BLOCKS),
        (replace(BLOCKS, form="float-quantized"), Kind.FP8_BLOCKS, Kind.FP8_BLOCKS),
        (schemes.fp8("dynamic", [64, 128]), None, None),
        (schemes.fp8("dynamic", [1, 128]), None, None),
        (PACKED, Kind.COMPRESSED, Kind.COMPRESSED),
        (replace(PACKED, weights=replace(PACKED.weights, bits=2)), None, None),
        (replace(PACKED, inputs=TOKEN), None, None),
        (replace(PACKED, inputs=schemes.INT8_ROWS), Kind.COMPRESSED, Kind.COMPRESSED),
        (STORED, Kind.INT4, Kind.INT4),
        (replace(STORED, weights=Numbers(4, "int", "channel")), Kind.INT4, Kind.INT4),
        (replace(STORED, weights=replace(STORED.weights, symmetric=False)), None, None),
        (replace(STORED, inputs=TOKEN), None, None),
        (replace(STORED, inputs=None), None, None),
        (MXFP8, Kind.MXFP8, Kind.MXFP8),
        (replace(MXFP8, inputs=replace(MXFP8.weights, dynamic=True)), Kind.MXFP8, Kind.MXFP8),
        (replace(MXFP8, weights=replace(MXFP8.weights, group=64)), None, None),
        (schemes.modelopt("MXFP8", 0), Kind.MXFP8, Kind.MXFP8),
        (schemes.gptq(GPTQ), Kind.GPTQ, Kind.GPTQ),
        (schemes.awq(4, 32, zero_point=True), Kind.AWQ, Kind.AWQ),
    ],
)
def test_a_scheme_has_one_kind_of_layers_and_one_of_experts(
    scheme: Scheme, dense: Kind | None, experts: Kind | None
) -> None:
    assert (kind_of(scheme), kind_of(scheme, experts=True)) == (dense, experts)


@pytest.mark.parametrize(
    ("dynamic", "expected"),
    [
        ({}, None),
        ({"-:.*mlp": {}}, schemes.LEFT),
        ({"+:.*mlp": {"bits": 8}}, schemes.gptq({**GPTQ, "bits": 8})),
        ({".*mlp": {"group_size": -1, "desc_act": True}}, schemes.gptq({**GPTQ, "group_size": -1})),
        ({"-:mlp": {}}, None),
        ({"-:.*other": {}, "+:.*mlp": {"bits": 8}, "-:.*": {}}, schemes.gptq({**GPTQ, "bits": 8})),
    ],
)
def test_the_first_rule_of_gptq_that_matches_from_the_start_of_a_name_counts(
    dynamic: dict[str, dict[str, object]], expected: Scheme | str | None
) -> None:
    assert schemes.gptq_rule(GPTQ, dynamic)("model.mlp") == expected
