"""The kernel of each kind of quantized checkpoint under each host, or its refusal: ``quantized_served.txt``.

``QuantizedLayers`` (``single_quantized.py``) gets the method of each layer from a host's configuration, without an
engine or memory for weights, and compares it with the file. With ``WRITE_SERVED=1`` it writes the host's
lines. ``PLUGIN`` is the plugin's name, and ``NAME`` the layer's.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantized_checkpoints import (
    AUTO_ROUND,
    AWQ,
    CACHE_SCHEME,
    FP8_CONFIG,
    GPTQ,
    MXFP4,
    MXFP8,
    NVFP4,
    SCHEMES,
    TOKEN8,
    TOKEN_FP8,
    W4,
    compressed,
    modelopt,
    quark,
    whole,
)

FILE = Path(__file__).with_suffix(".txt")
LAYER = "model.layers.0"
LAYERS: Mapping[str, str] = {
    "linear": f"{LAYER}.mlp.down_proj",
    "joined": f"{LAYER}.mlp.gate_up_proj",
    "experts": f"{LAYER}.mlp.experts",
    "head": "lm_head",
    "embedding": "model.embed_tokens",
    "cache": f"{LAYER}.self_attn.attn",
}
"""Kinds of layers → the name of one. The cache is in fp8."""
SIZE = 128
"""Columns of each weight, and elements of each row."""
JOINED = {"gate_up_proj": ["gate_proj", "up_proj"]}
"""Layers that hosts merge into one."""

GPTQ4 = {**GPTQ, "bits": 4, "group_size": 32}
IN_AWQS_ORDER = {**AUTO_ROUND, "packing_format": "auto_round:auto_awq", "sym": False}
PACKED = compressed("pack-quantized", W4, None)
FP8_CHANNEL, INT8_CHANNEL = whole("float", "channel"), whole("int", "channel")
BLOCK_WEIGHTS = {**whole("float", "block"), "block_structure": [128, 128]}
BLOCK_ROWS = {**whole("float", "group"), "group_size": 128, "dynamic": True}
STATIC_INT8 = {**whole("int", "tensor"), "dynamic": False}
STATIC_FP8 = {**whole("float", "tensor"), "dynamic": False}
TOKEN4 = {"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True}
ROTATED = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input", "ignore": []}]}
SPARSE = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]}


def _targeting(*targets: str) -> dict[str, Any]:
    (group,) = PACKED["config_groups"].values()
    return {**PACKED, "ignore": [], "config_groups": {"group_0": {**group, "targets": [*targets]}}}


def _in_two_groups(first: str) -> dict[str, Any]:
    """Return a configuration of 4 bits, with 8 bits for layers that match an expression."""
    (group,) = PACKED["config_groups"].values()
    other = {**group, "targets": [first], "weights": {**group["weights"], "num_bits": 8}}
    return {**PACKED, "config_groups": {"group_0": other, "group_1": group}}


CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {
    **{name: scheme.config for name, scheme in SCHEMES.items()},
    "compressed-tensors fp8, static": compressed("float-quantized", whole("float", "tensor"), STATIC_FP8),
    "compressed-tensors fp8, a scale a weight": compressed("float-quantized", whole("float", "tensor"), TOKEN_FP8),
    "compressed-tensors int8, a scale a weight": compressed("int-quantized", whole("int", "tensor"), TOKEN8),
    "compressed-tensors int8, static, a scale a column": compressed("int-quantized", INT8_CHANNEL, STATIC_INT8),
    "compressed-tensors fp8, static, a scale a column": compressed("float-quantized", FP8_CHANNEL, STATIC_FP8),
    "compressed-tensors fp8, oblong blocks": compressed(
        "float-quantized", {**BLOCK_WEIGHTS, "block_structure": [64, 128]}, BLOCK_ROWS
    ),
    "compressed-tensors int8 weights for inputs of fp8": compressed("int-quantized", INT8_CHANNEL, TOKEN_FP8),
    "compressed-tensors int8 for inputs with zero points": compressed(
        "int-quantized", INT8_CHANNEL, {**TOKEN8, "symmetric": False}
    ),
    "compressed-tensors int8, not packed, for inputs as they are": compressed("int-quantized", INT8_CHANNEL, None),
    "compressed-tensors int4 for inputs of int4": compressed("int-quantized", W4, TOKEN4),
    "compressed-tensors int4 for inputs of fp8": compressed("int-quantized", W4, TOKEN_FP8),
    "compressed-tensors int4 with zero points, packed, for inputs of int8": compressed(
        "pack-quantized", {**W4, "symmetric": False}, TOKEN8
    ),
    "compressed-tensors int4 for static inputs of int8": compressed("int-quantized", W4, STATIC_INT8),
    "compressed-tensors MXFP8, other groups": compressed("mxfp8-quantized", {**MXFP8, "group_size": 64}, None),
    "compressed-tensors W2A16": compressed("pack-quantized", {**W4, "num_bits": 2}, None),
    "compressed-tensors MXFP4 for inputs of fp8": compressed("mxfp4-pack-quantized", MXFP4, TOKEN_FP8),
    "compressed-tensors NVFP4, other groups": compressed("nvfp4-pack-quantized", {**NVFP4, "group_size": 32}, None),
    "compressed-tensors fp8 with zero points": compressed(
        "float-quantized", {**FP8_CHANNEL, "symmetric": False}, TOKEN_FP8
    ),
    "compressed-tensors, columns in groups of their own": compressed(
        "pack-quantized", {**W4, "actorder": "group"}, None
    ),
    "compressed-tensors, columns in the checkpoint's order": compressed(
        "pack-quantized", {**W4, "actorder": "static"}, None
    ),
    "compressed-tensors, columns in the order of their scales": compressed(
        "pack-quantized", {**W4, "actorder": "weight"}, None
    ),
    "compressed-tensors int8, a scale a weight, for static inputs of fp8": compressed(
        "int-quantized", whole("int", "tensor"), STATIC_FP8
    ),
    "compressed-tensors, rotated inputs": {**PACKED, "transform_config": {"config_groups": {"R4": ROTATED}}},
    "compressed-tensors, no layer left": {**PACKED, "ignore": []},
    "compressed-tensors, sparse": {
        **compressed("float-quantized", FP8_CHANNEL, TOKEN_FP8),
        "sparsity_config": SPARSE,
    },
    "compressed-tensors, layers in fp8 besides": {**PACKED, "linear_fp8_config": FP8_CONFIG},
    "compressed-tensors, parts that differ": {**PACKED, "ignore": ["lm_head", f"{LAYER}.mlp.gate_proj"]},
    "compressed-tensors, products that differ": _in_two_groups("re:.*down_proj"),
    "compressed-tensors, a head": _targeting("Linear", "re:.*lm_head"),
    "compressed-tensors, an embedding": _targeting("Linear", "re:.*embed_tokens"),
    "compressed-tensors, a cache": {**PACKED, "kv_cache_scheme": CACHE_SCHEME},
    "compressed-tensors, a cache by heads": {**PACKED, "kv_cache_scheme": {**CACHE_SCHEME, "strategy": "attn_head"}},
    "fp8, oblong blocks": {**FP8_CONFIG, "weight_block_size": [1, 128]},
    "fp8, not quantized": {"quant_method": "other", "activation_scheme": "dynamic"},
    "fp8, experts of another type": {**FP8_CONFIG, "store_dtype": "mxfp4"},
    "fp8 in groups of 32 (mxfp8)": {**FP8_CONFIG, "quant_method": "mxfp8"},
    "fp8, a layer left": {**FP8_CONFIG, "modules_to_not_convert": [LAYERS["linear"]]},
    "quark, mxfp4": quark(False, global_quant_config={"weight": {"dtype": "fp4", "qscheme": "per_group"}}),
    "quark, a cache": quark(True, kv_cache_quant_config={"*k_proj": {"dtype": "fp8_e4m3"}}),
    "quark, a layer left": quark(True, exclude=["lm_head", LAYERS["linear"], "re:.*experts.*"]),
    "modelopt, other groups": modelopt("NVFP4", group_size=32),
    "modelopt, other numbers": modelopt("FP8_PB_WO"),
    "modelopt, a layer left": modelopt("FP8", ignore=["lm_head", "*.down_proj"]),
    "modelopt, a head": modelopt("FP8", ignore=[]),
    "modelopt, a cache": modelopt("FP8", kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"}),
    "gptq, 5 bits": {**GPTQ4, "bits": 5},
    "gptq, zero points": {**GPTQ4, "sym": False},
    "gptq, columns in groups of their own": {**GPTQ4, "desc_act": True},
    "gptq, columns in the checkpoint's order": {**GPTQ4, "desc_act": True, "group_size": -1},
    "gptq, a layer of 3 bits": {**GPTQ4, "dynamic": {"+:.*down_proj": {"bits": 3}}},
    "gptq, a layer of 8 bits": {**GPTQ4, "dynamic": {"+:.*down_proj": {"bits": 8}}},
    "gptq, a layer left": {**GPTQ4, "dynamic": {"-:.*down_proj": {}}},
    "gptq, parts that differ": {**GPTQ4, "dynamic": {"-:.*gate_proj": {}}},
    "gptq, a head": {**GPTQ4, "lm_head": True},
    "auto-round, in awq's order": IN_AWQS_ORDER,
    "auto-round, 3 bits and zero points": {**AUTO_ROUND, "bits": 3, "sym": False},
    "auto-round, a layer left": {**AUTO_ROUND, "extra_config": {LAYERS["linear"]: {"bits": 16}}},
    "auto-round, a layer left in awq's order": {
        **IN_AWQS_ORDER,
        "extra_config": {LAYERS["linear"]: {"bits": 16}},
    },
    "auto-round, a layer of 8 bits in awq's order": {
        **IN_AWQS_ORDER,
        "extra_config": {LAYERS["linear"]: {"bits": 8}},
    },
    "auto-round, a name before an expression": {
        **AUTO_ROUND,
        "extra_config": {r"mlp\.": {"bits": 16}, LAYERS["linear"].removeprefix("model."): {"bits": 8}},
    },
    "auto-round, other blocks": {**AUTO_ROUND, "block_name_to_quantize": ["model.layers.1", "model.layers.2"]},
    "auto-round, the blocks of a model of pictures": {
        **AUTO_ROUND,
        "block_name_to_quantize": "visual.blocks,model.language_model.layers",
    },
    "auto-round, a head": {**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 4}}},
    "auto-round, other blocks in awq's order": {**IN_AWQS_ORDER, "block_name_to_quantize": "model.layers.1"},
    "auto-round, a router left in awq's order": {
        **IN_AWQS_ORDER,
        "extra_config": {f"{LAYER}.mlp.gate": {"bits": 16}, r".*\.self_attn\.": {"bits": 16}},
    },
    "auto-round, no expression": {**IN_AWQS_ORDER, "extra_config": {"mlp.(": {"bits": 16}}},
    "auto-round, bits that are no number": {**AUTO_ROUND, "extra_config": {"lm_head": {"bits": None}}},
    "auto-round, blocks that are no names": {**AUTO_ROUND, "block_name_to_quantize": [["model.layers"]]},
    "auto-round, without bits": {key: value for key, value in AUTO_ROUND.items() if key != "bits"},
    "auto-round, inputs of 8 bits": {**AUTO_ROUND, "act_bits": 8},
    "auto-round, mxfp4": {**AUTO_ROUND, "data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"},
    "auto-round, fp8": {**AUTO_ROUND, "data_type": "fp", "bits": 8, "group_size": [128, 128]},
    "auto-round, zero points in an order of its own": {**AUTO_ROUND, "sym": False, "packing_format": "auto_round"},
    "auto-round, a rule that is no table": {**AUTO_ROUND, "extra_config": {"lm_head": 16}},
    "awq, without zero points": {**AWQ, "zero_point": False},
    "awq, without groups": {**AWQ, "group_size": -1},
    "awq, 8 bits": {**AWQ, "bits": 8},
    "awq, version gemv": {**AWQ, "version": "GEMV"},
    "awq, parts that differ": {**AWQ, "modules_to_not_convert": ["gate_proj"]},
    "awq, a layer left": {**AWQ, "modules_to_not_convert": ["mlp"]},
}
"""Name → every kind of checkpoint that the tests serve, or that is refused."""
HOSTS = ("vllm", "sglang")
OWN = "the host's own"
"""The answer for a layer that is not quantized."""
BOTH, ALL = "both", "all"
Answers = dict[str, str]
"""A kind of layers → its kernel, or the refusal."""


def described(kernel: Any, layer: Any) -> str:
    """Return in words a layer's kernel, its operator, and the form of the weights that a checkpoint fills."""
    kinds = (kind for kind in type(kernel).__mro__ if kind.__module__.startswith("fl_dispatch."))
    said = [f"{next(kinds).__name__} ({kernel.fl_operator})"]
    read = {**vars(type(kernel)), **vars(kernel)}
    said += [f"{read[name]} bits" for name in ("fl_bits", "_bits") if name in read]
    said += [f"blocks of {block}" for block in [read.get("fl_block")] if block]
    said += ["zero points" for name in ("fl_zero_points", "_zero_points") if read.get(name)]
    said += ["rows quantized"] if read.get("fl_rounding") else []
    parameters = {name.removeprefix("w2_"): one for name, one in layer.named_parameters(recurse=False)}
    scales = next(parameters[name] for name in ("weight_scale_inv", "weight_scale", "scales") if name in parameters)
    said.append(f"scales {'x'.join(str(size) for size in scales.shape if size > 1) or 1}")
    said += [f"a scale of inputs for {count}" for count in [_count(parameters.get("input_scale"))] if count]
    return ", ".join(said)


def _count(scales: Any) -> int:
    return 0 if scales is None else scales.numel()


def answered(ask: Callable[[dict[str, Any], str], str]) -> dict[str, Answers]:
    """Return a host's answers; ``ask``: configuration and kind of layer → :func:`described`, or :data:`OWN`."""
    found: dict[str, Answers] = {}
    for name, config in CHECKPOINTS.items():
        answers = found.setdefault(name, {})
        for kind, prefix in LAYERS.items():
            try:
                answer = ask(copy.deepcopy(dict(config)), kind)
            except Exception as error:  # a host's own refusals are of several types
                answer = f"refused: {error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            if answer != OWN:
                said = " ".join(answer.split()).replace(prefix, "NAME")
                answers[kind] = re.sub(r"\b(?:vllm|sglang)_fl\b", "PLUGIN", said)
    return found


def recorded(host: str) -> dict[str, Answers]:
    """Return a host's answers from the file."""
    found: dict[str, Answers] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []:
        if not line.startswith(" "):
            answers = found.setdefault(line.strip(), {})
            continue
        kinds, whose, answer = line.split(maxsplit=2)
        if whose in (host, BOTH):
            answers.update(dict.fromkeys(LAYERS if kinds == ALL else kinds.split("+"), answer))
    return found


def check(host: str, found: dict[str, Answers]) -> None:
    """Compare a host's answers with the file's, or write them if ``WRITE_SERVED`` is set."""
    if os.environ.get("WRITE_SERVED"):
        (other,) = (name for name in HOSTS if name != host)
        _write({host: found, other: recorded(other)})
    expected = recorded(host)
    for name, answers in found.items():
        assert answers == expected.get(name), f"{name}, under {host}"
    assert list(expected) == list(found)


def _write(hosts: Mapping[str, dict[str, Answers]]) -> None:
    lines = []
    for name in CHECKPOINTS:
        lines.append(name)
        kinds: dict[tuple[str, str], list[str]] = {}
        for kind in LAYERS:
            answers = {host: hosts[host].get(name, {}).get(kind, "") for host in HOSTS}
            equal = len(set(answers.values())) == 1
            for pair in [(BOTH, answers["vllm"])] if equal else answers.items():
                kinds.setdefault(pair, []).append(kind)
        for (whose, answer), of in kinds.items():
            if answer:
                lines.append(f"    {ALL if len(of) == len(LAYERS) else '+'.join(of):<14} {whose:<6} {answer}")
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
