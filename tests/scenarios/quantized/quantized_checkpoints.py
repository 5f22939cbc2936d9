"""Checkpoints of small models, quantized here in the formats of widely used libraries.

:mod:`quantized_network` has the right results.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import e2m1
from fl_dispatch.cli import small_model

FP8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's order of numbers in a word."""
Stored = dict[str, Tensor]
Written = tuple[Stored, Tensor]
"""A checkpoint's tensors of one weight, by suffix, and the dequantized weight."""


def symmetric(values: Tensor, largest: float, dim: int | None = -1) -> Tensor:
    """Return scales with which the largest magnitude becomes ``largest``."""
    highest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    return (highest / largest).clamp(min=1e-10)


def nearest(values: Tensor, kind: torch.dtype) -> Tensor:
    """Return the nearest numbers of a dtype."""
    limit = 127.0 if kind is torch.int8 else 448.0
    values = values.clamp(-limit, limit)
    return (values.round() if kind is torch.int8 else values).to(kind)


def pack(numbers: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Pack non-negative numbers into words of 32 bits along a dimension; ``order``: order of a word's numbers."""
    numbers = numbers.to(torch.int64).movedim(dim, -1)
    if order is not None:
        numbers = numbers.unflatten(-1, (-1, len(order)))[..., list(order)].flatten(-2)
    each = (numbers[..., None] >> torch.arange(bits)) & 1
    words = (each.flatten(-2).unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().movedim(-1, dim).contiguous()


def eight_bits(kind: torch.dtype, per: str, rows: float | None = None, scale_name: str = "weight_scale") -> Any:
    """Return a writer of 8-bit weights with a scale per column, weight or block of 128; ``rows``: scale of inputs."""

    def write(weight: Tensor) -> Written:
        largest = 127.0 if kind is torch.int8 else 448.0
        if per == "block":
            columns, inner = weight.shape
            whole = functional.pad(weight, (0, -inner % 128, 0, -columns % 128))
            blocks = whole.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))  # [down, 128, across, 128]
            scale = (blocks.abs().amax((1, 3)) / largest).clamp(min=1e-10)
            full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:columns, :inner]
        else:
            scale = symmetric(weight, largest, -1 if per == "channel" else None)
            full = scale
        stored = nearest(weight / full, kind)
        given = {} if rows is None else {"input_scale": torch.tensor([rows])}
        shown = scale.reshape(1) if per == "tensor" else scale
        return {"weight": stored, scale_name: shown, **given}, stored.float() * full

    return write


LEAST = 2.0**-24
"""The smallest number of float16, and so the scale of zeros alone."""


def few_bits(form: str, bits: int, group: int | None, zeros: bool) -> Any:
    """Return a writer of packed weights of few bits for ``gptq``, ``auto-round``, ``awq`` and ``compressed-tensors``.

    ``group``: number of elements of a row that share a scale, or ``None`` for the whole row.
    """

    def write(weight: Tensor) -> Written:
        columns, inner = weight.shape
        parts, highest, middle = weight.view(columns, -1, group or inner), (1 << bits) - 1, 1 << (bits - 1)
        if zeros:
            low, high = parts.amin(-1, keepdim=True).clamp(max=0), parts.amax(-1, keepdim=True).clamp(min=0)
            scale = ((high - low) / highest).half().float().clamp(min=LEAST)
            zero = (-low / scale).round().clamp(0, highest)
        else:
            scale = symmetric(parts, middle - 0.5).half().float().clamp(min=LEAST)
            zero = torch.full_like(scale, middle)
        numbers = (parts / scale + zero).round().clamp(0, highest)
        dequantized = ((numbers - zero) * scale).view(columns, inner)
        numbers, scale, zero = numbers.view(columns, inner), scale[..., 0], zero[..., 0]
        if form == "awq":
            words = [pack(one.t(), bits, 1, AWQ_ORDER) for one in (numbers, zero)]
            return {"qweight": words[0], "qzeros": words[1], "scales": scale.t().half().contiguous()}, dequantized
        if form in ("gptq", "auto-round"):
            order = torch.arange(inner, dtype=torch.int32) // (group or inner)
            stored = {"qweight": pack(numbers.t(), bits, 0), "qzeros": pack(zero.t() - 1, bits, 1)}
            stored |= {"g_idx": order} if form == "gptq" else {}
            return {**stored, "scales": scale.t().half().contiguous()}, dequantized
        stored = {"weight_packed": pack(numbers, bits, 1), "weight_scale": scale.half()}
        stored["weight_shape"] = torch.tensor([columns, inner])
        return {**stored, **({"weight_zero_point": pack(zero, bits, 0)} if zeros else {})}, dequantized

    return write


def e2m1_weights(pack_groups: Callable[[Tensor], tuple[Tensor, Tensor, Stored]]) -> Any:
    """Return a writer of e2m1 weights for ``compressed-tensors``; ``pack_groups`` gives bytes, scales and tensors."""

    def write(weight: Tensor) -> Written:
        found, scale, stored = pack_groups(weight)
        return {"weight_packed": found.flatten(-2), **stored}, (e2m1.numbers(found) * scale[..., None]).flatten(-2)

    return write


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Stored]:
    found, exponents = e2m1.mxfp4(weight)
    return found, (exponents.float() - 127).exp2(), {"weight_scale": exponents}


def nvfp4(weight: Tensor, **given: Tensor) -> tuple[Tensor, Tensor, Stored]:
    """Return bytes, scales and tensors of NVFP4; ``given``: further stored tensors."""
    groups = weight.unflatten(-1, (-1, 16))
    scale = groups.abs().amax(-1) / e2m1.MAGNITUDES[-1]
    divisor = (448.0 / scale.amax()).reshape(1)
    stored = (scale * divisor).to(FP8)
    scale = stored.float() / divisor
    found = e2m1.in_bytes(e2m1.codes(groups / scale.clamp(min=1e-10)[..., None]))
    return (
        found,
        scale,
        {"weight_scale": stored, "weight_global_scale": divisor, **{name: one.clone() for name, one in given.items()}},
    )


def int4(weight: Tensor) -> Written:
    """Write integers of 4 bits in groups of 32, one per byte."""
    parts = weight.unflatten(-1, (-1, 32))
    scale = symmetric(parts, 7.5).half().float()
    numbers = (parts / scale).round().clamp(-8, 7)
    stored = {"weight": numbers.flatten(-2).to(torch.int8), "weight_scale": scale[..., 0].half()}
    return stored, (numbers * scale).flatten(-2)


def mxfp8(weight: Tensor) -> Written:
    """Write fp8 with a power of two as the scale of 32 elements."""
    parts = weight.unflatten(-1, (-1, 32))
    exponents = (parts.abs().amax(-1, keepdim=True) / 448.0).log2().ceil().clamp(min=-127)
    numbers = (parts / exponents.exp2()).to(FP8)
    stored = {"weight": numbers.flatten(-2), "weight_scale": (exponents[..., 0] + 127).to(torch.uint8)}
    return stored, (numbers.float() * exponents.exp2()).flatten(-2)


def modelopt_nvfp4(rows: float | None = None) -> Any:
    """Return a writer of ``modelopt``'s NVFP4; ``rows``: the factor of all scales of inputs."""

    def write(weight: Tensor) -> Written:
        stored, stands_for = e2m1_weights(nvfp4)(weight)
        names = {"weight_packed": "weight", "weight_scale": "weight_scale"}
        found = {names[name]: stored[name] for name in names}
        found["weight_scale_2"] = 1 / stored["weight_global_scale"].squeeze()
        return {**found, **({} if rows is None else {"input_scale": torch.tensor(rows)})}, stands_for

    return write


def modelopt_fp8(weight: Tensor) -> Written:
    """Write ``modelopt``'s FP8, with scales without dimensions."""
    stored, stands_for = eight_bits(FP8, "tensor", STATIC)(weight)
    return {name: part.squeeze() if name.endswith("scale") else part for name, part in stored.items()}, stands_for


def modelopt(algorithm: str, **said: Any) -> dict[str, Any]:
    """Return the configuration of a ``modelopt`` checkpoint, as nvidia-modelopt 0.47.0 writes it."""
    numbers = {
        "FP8": {"dynamic": False, "num_bits": 8, "type": "float"},
        "NVFP4": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
    }.get(algorithm.removeprefix("W4A16_"))
    inputs = {} if algorithm.startswith("W4A16_") else {"input_activations": numbers}
    groups = {"config_groups": {"group_0": {**inputs, "weights": numbers, "targets": ["Linear"]}}} if numbers else {}
    left = {"ignore": ["lm_head", "model.embed_tokens"], "producer": {"name": "modelopt", "version": "0.47.0"}}
    return {**groups, **left, "quant_algo": algorithm, "quant_method": "modelopt", **said}


def quark(inputs: bool, **said: Any) -> dict[str, Any]:
    """Return the configuration of a ``quark`` checkpoint in fp8 (0.13); ``inputs``: whether their scale is static."""
    numbers = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": numbers, "input_tensors": {**numbers, "is_dynamic": not inputs}},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        **said,
    }


def rows_of_the_library(inputs: Mapping[str, Any], of_all: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function that quantizes inputs by the format's own library; ``of_all``: the divisor of all scales."""
    said = QuantizationArgs(**inputs)

    def change(x: Tensor) -> Tensor:
        rows = x.reshape(1, -1, x.shape[-1])  # with two or four dimensions the library gives several tokens one scale
        scale, zero = compute_dynamic_scales_and_zp(rows, said, torch.nn.Module(), of_all)
        return fake_quantize(rows, scale, zero, said, global_scale=of_all).view(x.shape)

    return change


def rows_of(kind: torch.dtype, group: int = 0, scale: float | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function that quantizes inputs with a scale per row or group, or with a given scale."""
    largest = 127.0 if kind is torch.int8 else 448.0

    def change(x: Tensor) -> Tensor:
        inner = x.shape[-1]
        parts = functional.pad(x, (0, -inner % (group or inner))).unflatten(-1, (-1, group or inner))
        units = symmetric(parts, largest) if scale is None else scale
        return (nearest(parts / units, kind).float() * units).flatten(-2)[..., :inner]

    return change


def compressed(form: str, weights: Mapping[str, Any], rows: Mapping[str, Any] | None, **said: Any) -> dict[str, Any]:
    """Return the configuration of a ``compressed-tensors`` checkpoint; ``said``: further fields of its one group."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": None if rows is None else {"symmetric": True, **rows},
        **said,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def whole(kind: str, strategy: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy}


@dataclass(frozen=True)
class Scheme:
    """One kind of checkpoint.

    Args:
        config: the ``quantization_config``.
        write: weight → its stored tensors, and the dequantized weight.
        rows: quantizes and dequantizes a product's input; ``None`` for unquantized inputs.
        operators: our operators that must run.
        layer: our kernel for its layers.
        layers: the schemes of the model's layers, if they differ.
    """

    config: Mapping[str, Any]
    write: Callable[[Tensor], Written]
    layer: str
    rows: Callable[[Tensor], Tensor] | None = None
    operators: tuple[str, ...] = field(default=("quantize", "scaled_linear"))
    layers: tuple[Scheme, ...] = ()

    def of(self, name: str) -> Scheme:
        """Return the scheme of a product of the model, or of its weight."""
        return self.layers[int(name.split("layers.")[1].split(".", maxsplit=1)[0])] if self.layers else self

    def leaves(self, name: str) -> bool:
        """Whether the checkpoint lists a product as unquantized."""
        return False


ONLY = ("weight_only_linear",)
STATIC = 0.05
"""A static scale of inputs."""
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
TOKEN8, TOKEN_FP8 = {**whole("int", "token"), "dynamic": True}, {**whole("float", "token"), "dynamic": True}
BLOCK = {**whole("float", "block"), "block_structure": [128, 128]}
GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "bits": 4,
    "group_size": 32,
    "sym": True,
}
"""Without settings that no host reads; written by auto_round 0.16.1."""
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
E2M1 = {"num_bits": 4, "type": "float"}
MXFP8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MXFP8_ROWS = {**MXFP8, "dynamic": True}
MXFP4 = {**E2M1, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NVFP4 = {**E2M1, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
MXFP4_ROWS, NVFP4_ROWS = {**MXFP4, "dynamic": True}, {**NVFP4, "dynamic": "local"}
OF_ALL = torch.tensor([300.0])
"""The static divisor of all scales of inputs."""
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic"}
I8 = torch.int8

SCHEMES: Mapping[str, Scheme] = {
    "compressed-tensors W8A8 int8": Scheme(
        compressed("int-quantized", whole("int", "channel"), TOKEN8),
        eight_bits(I8, "channel"),
        "Int8Layer",
        rows_of(I8),
    ),
    "compressed-tensors W8A8 int8, static": Scheme(
        compressed("int-quantized", whole("int", "tensor"), {**whole("int", "tensor"), "dynamic": False}),
        eight_bits(I8, "tensor", STATIC),
        "Int8Layer",
        rows_of(I8, scale=STATIC),
    ),
    "compressed-tensors W8A8 fp8": Scheme(
        compressed("float-quantized", whole("float", "channel"), TOKEN_FP8),
        eight_bits(FP8, "channel"),
        "Fp8Layer",
        rows_of(FP8),
    ),
    "compressed-tensors W8A8 fp8, blocks of 128": Scheme(
        compressed("float-quantized", BLOCK, {**whole("float", "group"), "group_size": 128, "dynamic": True}),
        eight_bits(FP8, "block"),
        "Fp8BlockLayer",
        rows_of(FP8, group=128),
    ),
    "compressed-tensors W8A16 fp8": Scheme(
        compressed("float-quantized", whole("float", "channel"), None),
        eight_bits(FP8, "channel"),
        "Fp8WeightLayer",
        operators=ONLY,
    ),
    "compressed-tensors W4A16": Scheme(
        compressed("pack-quantized", W4, None), few_bits("packed", 4, 32, False), "PackedLayer", operators=ONLY
    ),
    "compressed-tensors W4A16, zero points": Scheme(
        compressed("pack-quantized", {**W4, "symmetric": False}, None),
        few_bits("packed", 4, 32, True),
        "PackedLayer",
        operators=ONLY,
    ),
    "compressed-tensors W8A16 int8": Scheme(
        compressed("pack-quantized", whole("int", "channel"), None),
        few_bits("packed", 8, None, False),
        "PackedLayer",
        operators=ONLY,
    ),
    "compressed-tensors W8A16 int8, groups": Scheme(
        compressed("pack-quantized", {**W4, "num_bits": 8}, None),
        few_bits("packed", 8, 32, False),
        "PackedLayer",
        operators=ONLY,
    ),
    "compressed-tensors W4A8 int8": Scheme(
        compressed("int-quantized", W4, TOKEN8), int4, "Int4Layer", rows_of_the_library(TOKEN8), ONLY
    ),
    "compressed-tensors W4A8 int8, packed": Scheme(
        compressed("pack-quantized", W4, TOKEN8, format="pack-quantized"),  # else one number per byte
        few_bits("packed", 4, 32, False),
        "PackedLayer",
        rows_of_the_library(TOKEN8),
        ONLY,
    ),
    "compressed-tensors MXFP8": Scheme(
        compressed("mxfp8-quantized", MXFP8, MXFP8_ROWS), mxfp8, "Mxfp8Layer", rows_of_the_library(MXFP8_ROWS), ONLY
    ),
    "compressed-tensors MXFP8A16": Scheme(
        compressed("mxfp8-quantized", MXFP8, None), mxfp8, "Mxfp8Layer", operators=ONLY
    ),
    "compressed-tensors MXFP4A16": Scheme(
        compressed("mxfp4-pack-quantized", MXFP4, None), e2m1_weights(mxfp4), "Float4Layer", operators=ONLY
    ),
    "compressed-tensors NVFP4A16": Scheme(
        compressed("nvfp4-pack-quantized", NVFP4, None), e2m1_weights(nvfp4), "Float4Layer", operators=ONLY
    ),
    "compressed-tensors MXFP4": Scheme(
        compressed("mxfp4-pack-quantized", MXFP4, MXFP4_ROWS),
        e2m1_weights(mxfp4),
        "Float4Layer",
        rows_of_the_library(MXFP4_ROWS),
        ONLY,
    ),
    "compressed-tensors NVFP4": Scheme(
        compressed("nvfp4-pack-quantized", NVFP4, NVFP4_ROWS),
        e2m1_weights(partial(nvfp4, input_global_scale=OF_ALL)),
        "Float4Layer",
        rows_of_the_library(NVFP4_ROWS, OF_ALL),
        ONLY,
    ),
    "fp8": Scheme(FP8_CONFIG, eight_bits(FP8, "tensor"), "Fp8Layer", rows_of(FP8)),
    "fp8, static": Scheme(
        {**FP8_CONFIG, "activation_scheme": "static"},
        eight_bits(FP8, "tensor", STATIC),
        "Fp8Layer",
        rows_of(FP8, scale=STATIC),
    ),
    "fp8, blocks of 128": Scheme(
        {**FP8_CONFIG, "weight_block_size": [128, 128]},
        eight_bits(FP8, "block", scale_name="weight_scale_inv"),
        "Fp8BlockLayer",
        rows_of(FP8, group=128),
    ),
    "modelopt FP8": Scheme(modelopt("FP8"), modelopt_fp8, "Fp8Layer", rows_of(FP8, scale=STATIC)),
    "quark fp8": Scheme(quark(False), eight_bits(FP8, "tensor"), "Fp8Layer", rows_of(FP8)),
    "quark fp8, static": Scheme(quark(True), eight_bits(FP8, "tensor", STATIC), "Fp8Layer", rows_of(FP8, scale=STATIC)),
    "modelopt MXFP8": Scheme(modelopt("MXFP8"), mxfp8, "Mxfp8Layer", rows_of_the_library(MXFP8_ROWS), ONLY),
    "modelopt W4A16_NVFP4": Scheme(modelopt("W4A16_NVFP4"), modelopt_nvfp4(), "Float4Layer", operators=ONLY),
    "modelopt NVFP4": Scheme(
        modelopt("NVFP4"),
        modelopt_nvfp4(1 / float(OF_ALL)),
        "Float4Layer",
        rows_of_the_library(NVFP4_ROWS, OF_ALL),
        ONLY,
    ),
    "gptq": Scheme(
        {**GPTQ, "bits": 4, "group_size": 32}, few_bits("gptq", 4, 32, False), "PackedLayer", operators=ONLY
    ),
    "gptq, 2 bits": Scheme(
        {**GPTQ, "bits": 2, "group_size": 32}, few_bits("gptq", 2, 32, False), "PackedLayer", operators=ONLY
    ),
    "gptq, 3 bits": Scheme(
        {**GPTQ, "bits": 3, "group_size": 32}, few_bits("gptq", 3, 32, False), "PackedLayer", operators=ONLY
    ),
    "gptq, 8 bits": Scheme(
        {**GPTQ, "bits": 8, "group_size": 128}, few_bits("gptq", 8, 128, False), "PackedLayer", operators=ONLY
    ),
    "auto-round": Scheme(AUTO_ROUND, few_bits("auto-round", 4, 32, False), "PackedLayer", operators=ONLY),
    "awq": Scheme(AWQ, few_bits("awq", 4, 32, True), "PackedLayer", operators=ONLY),
}


def layered(*names: str) -> Scheme:
    """Return a ``compressed-tensors`` checkpoint with one scheme per layer."""
    schemes, groups = [SCHEMES[name] for name in names], {}
    for number, scheme in enumerate(schemes):
        (group,) = scheme.config["config_groups"].values()
        targets = [rf"re:.*layers\.{number}\..*_proj$"]
        groups[f"group_{number}"] = {**group, "targets": targets, "format": scheme.config["format"]}
    config = {**schemes[0].config, "format": "mixed-precision", "config_groups": groups}
    operators = dict.fromkeys(operator for scheme in schemes for operator in scheme.operators)
    return Scheme(config, schemes[0].write, "", operators=tuple(operators), layers=tuple(schemes))


QUANTIZED = (
    "_proj",
    "kv_a_proj_with_mqa",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_qkvz",
    "input_linear",
    "output_linear",
    *(f".w{number}" for number in (1, 2, 3)),
    "indexer.wq_b",
    "indexer.wk",
)
"""Ends of the names of products that checkpoints quantize.

Published checkpoints do not quantize routers, convolutions, the small products of a delta net's gates
(``in_proj_ba``), the first product of a predictor (``eh_proj``) and an indexer's weights of heads (``weights_proj``).
"""


def is_product(name: str) -> bool:
    """Whether a tensor of a checkpoint is the weight of a product that schemes quantize."""
    module, _, weight = name.rpartition(".")
    return weight == "weight" and module.endswith(QUANTIZED) and not module.endswith(("eh_proj", "weights_proj"))


CACHE_SCALES = ((0.011, 0.0023), (0.017, 0.0031), (0.023, 0.0041), (0.029, 0.0053))
"""Scales of keys and values for each layer, small enough to clip some of them."""
CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
"""The part of a ``compressed-tensors`` configuration that declares scales of the cache."""


def _leaving_others(scheme: Scheme, stored: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """Return the configuration with the unquantized layers in the format of its method; ``stored``: tensors.

    These layers are routers, gates, convolutions, and those that the scheme lists; embeddings and heads need no entry.
    """
    quantization = scheme.config
    weights = [name for name, tensor in stored.items() if name.endswith(".weight") and tensor.dim() > 1]
    found = [name.removesuffix(".weight") for name in weights if not is_product(name) or scheme.leaves(name)]
    left = [name for name in found if not name.endswith(("embed_tokens", "embeddings", "lm_head"))]
    if not left:
        return quantization
    if quantization["quant_method"] in ("compressed-tensors", "modelopt"):
        return {**quantization, "ignore": [*quantization["ignore"], *left]}
    if quantization["quant_method"] == "quark":
        return {**quantization, "exclude": [*quantization["exclude"], *left]}
    if quantization["quant_method"] == "gptq":
        return {**quantization, "dynamic": {f"-:{re.escape(name)}$": {} for name in left}}
    if quantization["quant_method"] == "auto-round":
        return {**quantization, "extra_config": {name: {"bits": 16} for name in left}}
    return {**quantization, "modules_to_not_convert": left}


def _stored(scheme: Scheme, weight: Tensor) -> Stored:
    """Return a checkpoint's tensors for one weight, or for a layer's experts in one tensor."""
    if weight.dim() == 2:
        return scheme.write(weight)[0]
    each = [scheme.write(one)[0] for one in weight]
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}


def write_checkpoint(
    folder: Path, scheme: Scheme, cache_scales: str = "", model: Path = small_model.CHECKPOINT
) -> Path:
    """Write a quantized checkpoint of a model, by default the package's small one.

    ``cache_scales``: the layer's module with the scales of a quantized cache, if any.
    """
    shutil.copytree(model, folder)
    stored: Stored = {}
    plain = load_file(folder / "model.safetensors")
    for name, tensor in plain.items():
        if is_product(name):
            parts = _stored(scheme.of(name), tensor.float())
            stored.update({name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in parts.items()})
        else:
            stored[name] = tensor
    for layer, scales in enumerate(CACHE_SCALES if cache_scales else ()):
        for letter, scale in zip("kv", scales, strict=True):
            owner = cache_scales.format(letter)
            stored[f"model.layers.{layer}.{owner}.{letter}_scale"] = torch.tensor([scale])
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = _leaving_others(scheme, plain)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


PLAIN = Scheme({}, lambda weight: ({"weight": weight}, weight), "", operators=())
"""The scheme of an unquantized product."""


@dataclass(frozen=True)
class Partly(Scheme):
    """A kind of checkpoint with some unquantized products; ``left``: the last parts of their names."""

    left: tuple[str, ...] = ()

    def of(self, name: str) -> Scheme:
        return PLAIN if name.removesuffix(".weight").rpartition(".")[2] in self.left else self


@dataclass(frozen=True)
class WithIndexer(Scheme):
    """A kind of checkpoint of a model with an indexer.

    The weight of its index keys is unquantized, or in fp8 blocks that hosts dequantize to bfloat16 when they load it.
    """

    def of(self, name: str) -> Scheme:
        if "indexer.wk" not in name:
            return self
        if self.leaves(name):
            return PLAIN

        def write(weight: Tensor) -> Written:
            stored, whole = self.write(weight)
            return stored, whole.bfloat16().float()

        return replace(PLAIN, write=write)

    def leaves(self, name: str) -> bool:
        return "indexer.wk" in name and self.layer != "Fp8BlockLayer"


@dataclass(frozen=True)
class OfExperts(Scheme):
    """A kind of checkpoint that quantizes only experts, without shared ones."""

    def of(self, name: str) -> Scheme:
        return self if ".experts." in name else PLAIN


KIMI_K2 = OfExperts(
    {
        **compressed("pack-quantized", W4, None),
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
    },
    few_bits("packed", 4, 32, False),
    "",
    operators=(),
)
"""A DeepSeek-V3 with experts of 4 bits, as Kimi K2 is published."""
