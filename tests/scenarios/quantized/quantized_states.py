"""Models whose layers keep a state, with quantized products: delta nets, state spaces and short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import quantized_engines
from architectures import build_architecture
from variants import changed

_DELTA: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5": _DELTA,  # four parts, which a checkpoint has in two products
    "qwen3_next": {
        **_DELTA,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_experts_per_tok": 4,  # all, because rounding turns near choices
    },
    "mamba2": {"hidden_size": 128, "num_heads": 16},  # five parts, none of them a whole block of 128
    "granitemoehybrid": {
        "hidden_size": 128,
        "mamba_n_heads": 16,
        "mamba_d_state": 16,
        "shared_intermediate_size": 128,
        "num_local_experts": 0,  # as Granite 4.0 Micro
    },
    "lfm2": {"hidden_size": 128, "conv_dim": 128, "block_dim": 128},
}
"""Architecture → sizes of its small checkpoint here: whole groups of 32, and some parts of whole blocks of 128."""
SCHEMES_OF_STATES = (
    "compressed-tensors W8A8 int8",
    "compressed-tensors W8A8 fp8",
    "compressed-tensors W4A16",
    "fp8",
    "fp8, blocks of 128",
    "gptq",
    "awq",
)
PRODUCTS: Mapping[str, int] = {
    "qwen3_5": 16,
    "qwen3_next": 16,
    "mamba2": 8,
    "granitemoehybrid": 16,
    "lfm2": 16,
}
"""The quantized products of all layers, merged as vLLM does; experts are none."""
EXPERT_LAYERS: Mapping[str, int] = {"qwen3_next": 4}
PLANTED: Mapping[str, tuple[str, slice]] = {
    "qwen3_5": ("in_proj_z.weight_scale", slice(None)),  # the fourth part of ``in_proj_qkvz``
    "mamba2": ("in_proj.weight_scale", slice(-16, None)),  # the steps, the last of five parts
}
"""Architecture → the scale of one part of a joined product, and its rows."""
FACTOR = 2.0
"""A factor by which that scale is wrong."""


def build(name: str, folder: Path) -> Path:
    """Write a model, not quantized."""
    return build_architecture(name, folder, **SIZES[name])


def planted(name: str, checkpoint: Path, folder: Path) -> Path:
    """A copy of a quantized checkpoint, in which the scale of one part is wrong."""
    suffix, rows = PLANTED[name]

    def change(tensor_name: str, tensor: Tensor) -> Tensor:
        if tensor_name.endswith(suffix):
            tensor[rows] *= FACTOR
        return tensor

    return changed(checkpoint, folder, change)


@dataclass(frozen=True, eq=False)
class Run(quantized_engines.Run):
    """An engine with one of the models."""

    model: str = "qwen3_5"

    def __str__(self) -> str:
        return f"{self.model}, {self.scheme}, {self.kind}"
