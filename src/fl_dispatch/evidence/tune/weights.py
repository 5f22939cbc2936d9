"""Quantized weights of a checkpoint, as the ``quantization_config`` of its ``config.json`` says."""

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
        dtype: name of the type of the numbers in memory; uint8 has two of 4 bits.
        inputs: rows are quantized to that dtype too.
        group: elements of a weight's row that have a scale in common; 0: the whole row.
        block: rows and columns of a weight that have a scale in common, and elements of an input; 0 without.
        zeros: groups have zero points.
        static: the scale of inputs is the checkpoint's.
    """

    dtype: str
    inputs: bool
    group: int = 0
    block: int = 0
    zeros: bool = False
    static: bool = False

    @property
    def kind(self) -> torch.dtype:
        """The type itself."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def operator(self) -> str:
        """The operator of a linear layer."""
        return "scaled_linear" if self.inputs else "weight_only_linear"

    @property
    def expert_operator(self) -> str:
        """The operator of a mixture of experts."""
        return "scaled_moe" if self.inputs else "weight_only_moe"


def read_weights(config: Mapping[str, Any], source: str) -> Weights | None:
    """How a model's weights are quantized, or ``None``. Layers that a checkpoint leaves out are taken for the others.

    Args:
        config: the content of ``config.json``.
        source: what an error names.

    Raises:
        DispatchError: the method or its parameters are none of those that are served.
    """
    given = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    read = READERS.get(str(method))
    if read is None:
        known = ", ".join(sorted(READERS))
        raise DispatchError(f"{source}: quant_method is {method!r}; fl tune knows the products of {known}")
    try:
        return read(given)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DispatchError(f"{source}: this quantization_config of {method} is not served: {error!r}") from error


def _fp8(given: Mapping[str, Any]) -> Weights:
    down, across = given.get("weight_block_size") or (0, 0)
    if down != across:
        raise ValueError(f"weight_block_size {down} x {across}")
    return Weights(FP8, inputs=True, block=int(down), static=given.get("activation_scheme") == "static")


def _compressed(given: Mapping[str, Any]) -> Weights:
    first, *_ = given["config_groups"].values()
    weights, inputs = first["weights"], first.get("input_activations")
    dtype = FP8 if weights["type"] == "float" else _of_bits(weights["num_bits"])
    if inputs is not None:
        down, _ = weights.get("block_structure") or (0, 0)
        return Weights(dtype, inputs=True, block=int(down), static=not inputs.get("dynamic", False))
    zeros = not weights.get("symmetric", True)
    return Weights(dtype, inputs=False, group=max(0, int(weights.get("group_size") or 0)), zeros=zeros)


def _in_groups(given: Mapping[str, Any]) -> Weights:
    """GPTQ's and AWQ's; -1 is a whole row to both."""
    bits, zeros = given.get("bits", given.get("w_bit")), given.get("zero_point", not given.get("sym", True))
    group = int(given.get("group_size", given.get("q_group_size", -1)))
    return Weights(_of_bits(bits), inputs=False, group=max(0, group), zeros=bool(zeros))


def _of_bits(bits: Any) -> str:
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits")
    return FOUR_BITS if bits == 4 else INT8


READERS: Mapping[str, Callable[[Mapping[str, Any]], Weights]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _in_groups,
    "awq": _in_groups,
}
"""``quant_method`` → its reader."""
