"""Every kind of rotation in configurations, and Hugging Face's queries rotated by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from host_engines import Scenario

HEADS, SIZE = 4, 16
TRAINED, LONGEST = 32, 128
LENGTHS = (10, TRAINED, TRAINED + 1, LONGEST)
_TRAINED = {"original_max_position_embeddings": TRAINED}
_YARN: Mapping[str, Any] = {"rope_type": "yarn", "factor": 4.0, **_TRAINED}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_TRAINED}
_LONG: Mapping[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * number for number in range(SIZE // 2)],
    "long_factor": [2.0 + 0.3 * number for number in range(SIZE // 2)],
    **_TRAINED,
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "default": {"rope_type": "default"},
    "default, another base": {"rope_type": "default", "rope_theta": 500000.5},
    "default, partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, partial": {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.5},
    "yarn": _YARN,
    "yarn, attention_factor": {**_YARN, "attention_factor": 1.5},
    "yarn, mscale": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, mscale alone": {**_YARN, "mscale": 0.7},
    "yarn, mscale_all_dim 0": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0},
    "yarn, truncate": {**_YARN, "truncate": False},
    "yarn, betas": {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, partial": {**_YARN, "partial_rotary_factor": 0.5},
    "yarn, factor below the length": {**_YARN, "factor": 2.5},
    "yarn, without the trained length": {"rope_type": "yarn", "factor": 4.0},
    "llama3": _LLAMA3,
    "llama3, partial": {**_LLAMA3, "partial_rotary_factor": 0.5},
    "longrope": _LONG,
    "longrope, factor": {**_LONG, "factor": 8.0},
    "longrope, attention_factor": {**_LONG, "attention_factor": 1.5},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "proportional, factor": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}
"""Name → ``rope_parameters``."""
LONG = [kind for kind, stated in KINDS.items() if stated["rope_type"] == "longrope"]
"""Kinds with two tables."""


def config(kind: str) -> Any:
    """Return the configuration of a Llama with the rotation."""
    from transformers import LlamaConfig

    parameters = {"rope_theta": 10000.0, **KINDS[kind]}
    shape = {"hidden_size": HEADS * SIZE, "num_attention_heads": HEADS, "num_hidden_layers": 1}
    return LlamaConfig(**shape, max_position_embeddings=LONGEST, rope_parameters=parameters)


def queries(length: int) -> Tensor:
    """Return queries ``[length, heads, size]`` of a text, identical at every call."""
    return torch.randn(length, HEADS, SIZE, generator=torch.Generator().manual_seed(length))


def turned(kind: str, length: int) -> Tensor:
    """Return a text's queries rotated by Hugging Face, ``[length, heads, size]``."""
    from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    stated = config(kind)
    partial = stated.rope_parameters["rope_type"] == "default" and "partial_rotary_factor" in stated.rope_parameters
    rotary = (GlmRotaryEmbedding if partial else LlamaRotaryEmbedding)(stated)  # Llama's default rotates whole heads
    cos, sin = (part[0, :, None] for part in rotary(torch.zeros(1), torch.arange(length)[None]))
    query = queries(length)
    width = cos.shape[-1]
    part, rest = query[..., :width], query[..., width:]
    half = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), -1)
    return torch.cat((part * cos + half * sin, rest), -1)


def placed(layer: nn.Module) -> nn.Module:
    """Return a model with a rotary layer at its place in a decoder."""
    attention = nn.ModuleDict({"rotary_emb": layer})
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": attention})])})})


def difference(layer: Any, kind: str, length: int, first: int = 0) -> float:
    """Return the largest difference of a layer's rotated queries from Hugging Face's; ``first``: its row of a table."""
    query = queries(length).flatten(1)
    found, _ = layer(first + torch.arange(length), query.clone(), query.clone())
    return float((found.view(length, -1, SIZE) - turned(kind, length)).abs().max())


class Rotations(Scenario):
    """Every kind of rotation with one table rotates queries like Hugging Face."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"kind": [kind for kind in KINDS if kind not in LONG]}

    def rotary(self, kind: str) -> Any:
        """Return the host's layer, corrected as in a loaded model: positions, queries and keys → both rotated."""
        raise NotImplementedError

    def test_queries_are_turned_as_in_hugging_face(self, kind: str) -> None:
        layer = self.rotary(kind)
        assert max(difference(layer, kind, length) for length in LENGTHS) < 1e-4
