"""Quantized weights of a checkpoint, from the ``quantization_config`` of its ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import DispatchError

INT8, FP8, FOUR_BITS = "int8", "float8_e4m3fn", "uint8"


@dataclass(frozen=True)
class Weights:
    """Quantized weights of the products and the experts of a model.

    Args:
        dtype: name of the stored dtype; a uint8 has two 4-bit numbers.
        inputs: whether rows are quantized to that dtype too.
        group: elements of a weight's row that share a scale; 0 for the whole row.
        block: rows and columns of a weight, and elements of an input, that share a scale; 0 without blocks.
        zeros: whether groups have zero points.
        static: whether the checkpoint has the input scale.
    """

    dtype: str
    inputs: bool
    group: int = 0
    block: int = 0
    zeros: bool = False
    static: bool = False

    @property
    def kind(self) -> torch.dtype:
        """Return the dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def of_rows(self, inner: int) -> Weights:
        """Return these weights for rows of ``inner`` elements.

        Raises:
            DispatchError: the rows are not whole groups.
        """
        if self.group and inner % self.group:
            raise DispatchError(f"{inner} elements of a weight's row on a rank are not whole groups of {self.group}")
        return self

    @property
    def operator(self) -> str:
        """Return the operator of a linear layer."""
        return "scaled_linear" if self.inputs else "weight_only_linear"

    @property
    def expert_operator(self) -> str:
        """Return the operator of a mixture of experts."""
        return "scaled_moe" if self.inputs else "weight_only_moe"


def read_weights(config: Mapping[str, Any], source: str) -> Weights | None:
    """Return a model's quantization, or ``None``. Layers that a checkpoint leaves unquantized count like the others.

    Args:
        config: the content of ``config.json``.
        source: the name for it in errors.

    Raises:
        DispatchError: the method or its parameters are not served.
    """
    given = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    read = READERS.get(str(method))
    if read is None:
        known = ", ".join(sorted(READERS))
        raise DispatchError(f"{source}: quant_method is {method!r}; fl tune knows the products of {known}")
    try:
        return read(given)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DispatchError(f"{source}: this quantization_config of {method} is not served: {error!r}") from error


def _fp8(given: Mapping[str, Any]) -> Weights:
    return Weights(
        FP8, True, block=_block(given.get("weight_block_size")), static=given.get("activation_scheme") == "static"
    )


def _compressed(given: Mapping[str, Any]) -> Weights:
    first, *_ = given["config_groups"].values()
    weights, inputs = first["weights"], first.get("input_activations")
    dtype, symmetric = _dtype(weights), weights.get("symmetric", True)
    if inputs is None:
        return Weights(dtype, False, _group(weights.get("group_size")), zeros=not symmetric)
    if dtype == FOUR_BITS or dtype != _dtype(inputs) or not (symmetric and inputs.get("symmetric", True)):
        raise ValueError("inputs and weights are not both symmetric numbers of 8 bits of one type")
    return Weights(dtype, True, block=_block(weights.get("block_structure")), static=not inputs.get("dynamic", False))


def _in_groups(given: Mapping[str, Any]) -> Weights:
    """Read the configuration of GPTQ and AWQ."""
    bits, zeros = given.get("bits", given.get("w_bit")), given.get("zero_point", not given.get("sym", True))
    group = given.get("group_size", given.get("q_group_size"))
    return Weights(_integers(bits), False, _group(group), zeros=bool(zeros))


def _dtype(numbers: Mapping[str, Any]) -> str:
    bits = numbers.get("num_bits", 8)
    if numbers.get("type", "int") != "float":
        return _integers(bits)
    if bits != 8:
        raise ValueError(f"floating point of {bits} bits")
    return FP8


def _integers(bits: Any) -> str:
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits")
    return FOUR_BITS if bits == 4 else INT8


def _group(size: Any) -> int:
    """Return a group size; 0 for a whole row, which checkpoints write as -1 or omit."""
    return max(0, int(size or 0))


def _block(sizes: Any) -> int:
    down, across = sizes or (0, 0)
    if down != across or int(down) < 0:
        raise ValueError(f"blocks of {down} x {across}")
    return int(down)


READERS: Mapping[str, Callable[[Mapping[str, Any]], Weights]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _in_groups,
    "awq": _in_groups,
}
"""``quant_method`` → its reader."""
