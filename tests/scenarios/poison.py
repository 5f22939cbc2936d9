"""A policy with a norm that gives NaN for one token's rows, and so for requests with it (``poisoned_norm``)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

POISON = 450
"""A token that occurs in no prompt and in no right answer."""
SAID = "its logits have NaN or infinity: they began in 'rms_norm' by 'vendor.poison' in model.layers.0.input_layernorm"
"""The reason in the client's error."""
ORIGIN = {"operator": "rms_norm", "implementation": "vendor.poison", "layer": "model.layers.0.input_layernorm"}
"""The labels of the counter of damage, besides the rank."""


def variables(model: Path, folder: Path, token: int = POISON, **more: str) -> dict[str, str]:
    """Write the token's embedding, by which the norm recognises it, to ``folder``; return the engine's variables.

    Only a network with this model's embedding of the token is poisoned.
    """
    with safe_open(model / "model.safetensors", "pt") as tensors:
        torch.save(tensors.get_tensor("model.embed_tokens.weight")[token].float(), folder / "poison.pt")
    policy = {"VLLM_FL_PLUGIN_MODULES": "poisoned_norm", "VLLM_FL_PER_OP": "rms_norm=vendor:poison|reference"}
    return {**policy, "POISON": str(folder / "poison.pt"), **more}
