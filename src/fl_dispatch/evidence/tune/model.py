"""The dimensions of a model, from its ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DispatchError
from .weights import Weights, read_weights

NORMALIZED_HEADS = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text"})
"""Types of models that normalize each head of query and key."""
GEMMA = "gemma"
"""Prefix of the types of models with their own norms."""
ACTIVATIONS = {"silu": "silu_and_mul", "swish": "silu_and_mul"}
"""``hidden_act`` → the gated activation; GELU's names all begin alike."""


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The numbers that determine the shapes of a rank's calls.

    Args:
        model_type: ``config.json``'s.
        hidden, heads, kv_heads, head_dim: dimensions of attention; heads are one rank's.
        inner: width of the gated activation of a dense layer on one rank; 0 without one.
        rotated: rotated elements of a head.
        dense_layers, expert_layers: numbers of layers of each kind.
        experts, topk, expert_inner, shared_inner: of a mixture of experts; 0 without one.
        groups: groups of experts, 0 without groups.
        sigmoid: experts are scored by the sigmoid function.
        latent_rank, latent_rope, query_rank: dimensions of latent attention; 0 without.
        activation, norm: operators.
        dtype: dtype of the weights, or of rows between quantized ones.
        weights: the quantization of products and experts, if any.
    """

    model_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    rotated: int
    dense_layers: int
    expert_layers: int
    experts: int
    topk: int
    expert_inner: int
    shared_inner: int
    groups: int
    sigmoid: bool
    latent_rank: int
    latent_rope: int
    query_rank: int
    activation: str
    norm: str
    dtype: str
    weights: Weights | None = None

    @property
    def layers(self) -> int:
        """Return the number of all layers."""
        return self.dense_layers + self.expert_layers

    @property
    def normalizes_heads(self) -> bool:
        """Whether query and key are normalized head by head."""
        return self.model_type in NORMALIZED_HEADS


def read_json(file: Path, without: str) -> Any:
    """Read a JSON file.

    Args:
        file: the file.
        without: the rest of the sentence "there is no FILE".

    Raises:
        DispatchError: the file is missing, or cannot be read.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DispatchError(f"there is no {file}{without}") from None
    except (OSError, ValueError) as error:
        raise DispatchError(f"{file} cannot be read: {error}") from error


def read_model(folder: Path, tensor_parallel: int = 1) -> Dimensions:
    """Read the dimensions of a model in a folder.

    Raises:
        DispatchError: there is no ``config.json``, it cannot be read, it lacks a dimension, a dimension cannot be
            divided among the ranks, or its quantization is none that is served.
    """
    file = folder / "config.json" if folder.is_dir() else folder
    config = read_json(file, "; --model names a folder that holds a model's config.json")
    if not isinstance(config, dict):
        raise DispatchError(f"{file} holds no mapping")
    return dimensions(config, tensor_parallel, str(file))


def dimensions(config: Mapping[str, Any], tensor_parallel: int = 1, source: str = "config.json") -> Dimensions:
    """Return the dimensions in a configuration; see :func:`read_model`.

    Args:
        config: the content of ``config.json``; its text model's part counts if there is one.
        tensor_parallel: ranks that share each layer.
        source: the name for it in errors.
    """
    text: Mapping[str, Any] = {**config, **(config.get("text_config") or {})}

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            if text.get(name) is not None:
                return int(text[name])
        if default is None:
            raise DispatchError(f"{source} has no '{names[0]}', so the shapes of the model's calls are unknown")
        return default

    def share(value: int, name: str) -> int:
        if value % tensor_parallel:
            raise DispatchError(f"{source}: {name}, {value}, cannot be divided among {tensor_parallel} ranks")
        return value // tensor_parallel

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads, layers = number("num_key_value_heads", default=heads), number("num_hidden_layers")
    head_dim = number("head_dim", default=hidden // heads)
    model_type, act = (
        str(text.get("model_type", "")),
        str(text.get("hidden_act", text.get("hidden_activation", "silu"))),
    )
    experts = number("num_experts", "n_routed_experts", "num_local_experts", default=0)
    expert_inner = number("moe_intermediate_size", "intermediate_size") if experts else 0
    dense = number("first_k_dense_replace", default=0) if experts else layers
    shared = number("n_shared_experts", default=0) * expert_inner
    latent = number("kv_lora_rank", default=0)
    norm = "rms_norm" if text.get("layer_norm_eps") is None or "rms_norm_eps" in text else "layer_norm"
    return Dimensions(
        model_type=model_type,
        hidden=hidden,
        heads=share(heads, "num_attention_heads"),
        kv_heads=share(kv_heads, "num_key_value_heads") if kv_heads >= tensor_parallel else 1,
        head_dim=head_dim,
        inner=share(number("intermediate_size", default=0), "intermediate_size") if dense else 0,
        rotated=int(head_dim * float(text.get("partial_rotary_factor") or 1)),
        dense_layers=dense,
        expert_layers=layers - dense,
        experts=experts,
        topk=number("num_experts_per_tok", default=0) if experts else 0,
        expert_inner=share(expert_inner, "moe_intermediate_size"),
        shared_inner=share(shared, "the shared experts' width"),
        groups=number("n_group", default=0) if str(text.get("topk_method", "")) not in ("", "greedy") else 0,
        sigmoid=text.get("scoring_func") == "sigmoid",
        latent_rank=latent,
        latent_rope=number("qk_rope_head_dim") if latent else 0,
        query_rank=number("q_lora_rank", default=0) if latent else 0,
        activation=ACTIVATIONS.get(act, "gelu_and_mul" if act.startswith("gelu") else act),
        norm="gemma_rms_norm" if model_type.startswith(GEMMA) else norm,
        dtype=str(text.get("torch_dtype") or text.get("dtype") or "bfloat16"),
        weights=read_weights(config, source),
    )
