"""A small Qwen3-MoE of random weights, all of whose layers have experts, for engines with quantized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_dispatch.cli.checkpoints import build_checkpoint
from quantized_checkpoints import Scheme

LAYERS = 2
SHAPE = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_hidden_layers": LAYERS,
}
EXPERTS = (
    "compressed-tensors W8A8 int8",
    "compressed-tensors W8A8 fp8",
    "compressed-tensors W4A16",
    "compressed-tensors W4A16, zero points",
    "compressed-tensors W8A16 int8",
    "compressed-tensors W8A16 int8, groups",
    "fp8",
    "fp8, static",
    "fp8, blocks of 128",
    "gptq",
    "gptq, 8 bits",
    "awq",
)
"""Schemes whose experts both hosts serve."""
BOTH_KINDS = ("compressed-tensors W8A8 int8", "awq")
"""Schemes of either operator, which run in every kind of engine."""


def mixture(folder: Path, **sizes: Any) -> Path:
    """Write the checkpoint, not quantized; ``sizes`` differ from :data:`SHAPE`."""
    return build_checkpoint("qwen3_moe", folder, **{**SHAPE, **sizes})


def operator(scheme: Scheme) -> str:
    """The operator that computes a scheme's experts."""
    return "scaled_moe" if "scaled_linear" in scheme.operators else "weight_only_moe"
