"""gpt-oss as its checkpoint is published: experts in MXFP4, all else plain.

:func:`dequantized` has Transformers turn the experts back, so that its plain network says what is right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from architectures import build_architecture
from e2m1 import mxfp4

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""The ``quantization_config`` of gpt-oss."""
SIZES = {"intermediate_size": 128}
"""Four groups between the two products of an expert, two on each of two ranks."""


def _rewritten(model: Path, folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> Path:
    shutil.copytree(model, folder)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        stored |= change(name, tensor)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def write_checkpoint(folder: Path, spoil: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor) -> Path:
    """Write a small checkpoint of gpt-oss in the published format; ``spoil``: name → other bytes of its MXFP4."""
    plain = build_architecture("gpt_oss", folder.with_name(f"{folder.name}-plain"), **SIZES)

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}
        blocks, scales = mxfp4(tensor.float().transpose(1, 2))
        return {part: spoil(part, made) for part, made in ((f"{name}_blocks", blocks), (f"{name}_scales", scales))}

    made = _rewritten(plain, folder, change)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    return made


def dequantized(checkpoint: Path, folder: Path) -> Path:
    """The same checkpoint with the experts as Transformers dequantizes them."""
    stored = load_file(checkpoint / "model.safetensors")

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name.endswith("_scales"):
            return {}
        if not name.endswith("_blocks"):
            return {name: tensor}
        scales = stored[name.replace("_blocks", "_scales")]
        return {name.removesuffix("_blocks"): convert_moe_packed_tensors(tensor, scales, dtype=torch.float32)}

    made = _rewritten(checkpoint, folder, change)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "quantization_config"}))
    return made
