"""Quark's format as far as it equals ``compressed-tensors``: fp8 with one scale per weight.

Both hosts read such a checkpoint as ``compressed-tensors``: tensors have the same names, and ``exclude`` has names, and
expressions after ``re:``, like ``ignore`` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import remedies
from .configurations import check
from .schemes import Refused

WEIGHTS = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
"""Settings of weights, and of inputs with either kind of scales."""
MORE = ("layer_quant_config", "layer_type_quant_config", "kv_cache_quant_config", "softmax_quant_spec", "algo_config")
"""Settings of some layers, of a cache, and of other computations."""
BESIDE = ("output_tensors", "bias")
"""Parts of all layers that may be quantized in addition to weights and inputs."""
ONE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def as_compressed(config: Mapping[str, Any], refused: Refused) -> dict[str, Any]:
    """Return a ``quark`` checkpoint's ``quantization_config`` in the terms of ``compressed-tensors``.

    Args:
        config: the checkpoint's ``quantization_config``.
        refused: the host's error.

    Raises:
        Exception: by ``refused``, for other numbers, and for settings of single layers.
    """
    remedy = remedies.of_method("quark")
    check("quark", config, refused)
    said = config.get("global_quant_config") or {}
    if more := [*filter(config.get, MORE), *filter(said.get, BESIDE)]:
        raise refused(f"'quark' with '{more[0]}'", remedy)
    weights, rows = _numbers(said.get("weight")), _numbers(said.get("input_tensors"))
    if rows and not isinstance(rows["is_dynamic"], bool):
        raise refused(f"'quark' with 'is_dynamic': {rows['is_dynamic']!r} of 'input_tensors'", remedy)
    if weights != WEIGHTS or {**rows, "is_dynamic": False} != WEIGHTS:
        raise refused(f"'quark' with weights {_words(weights)} for inputs {_words(rows)}", remedy)
    group = {
        "targets": ["Linear"],
        "weights": {**ONE, "dynamic": False},
        "input_activations": {**ONE, "dynamic": rows["is_dynamic"]},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": list(config.get("exclude") or ()),
    }


def _numbers(said: Any) -> dict[str, Any]:
    """Return the relevant settings of a part; empty if it is not quantized, or in several steps."""
    return {key: said.get(key) for key in WEIGHTS} if isinstance(said, Mapping) else {}


def _words(numbers: Mapping[str, Any]) -> str:
    return "of {dtype} ({qscheme})".format(**numbers) if numbers else "that are not quantized, or in several steps,"
