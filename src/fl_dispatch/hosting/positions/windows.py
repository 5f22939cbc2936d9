"""The sliding window of each layer as Transformers reads it from a model's configuration, beside a host's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WINDOWED: Mapping[str, bool] = {
    "sliding_attention": True,
    "hybrid_sliding": True,
    "full_attention": False,
}
"""Kinds of layers in ``layer_types`` that say whether a layer has the window."""
BESIDE_ITSELF = ("cohere2", "cohere2_moe")
"""Models whose window has the token itself beside it: both hosts say that they were trained so."""


def declares_window(config: Any) -> bool:
    """Whether the configuration's class has the field ``sliding_window``.

    Transformers' models read the field in that case alone: a Llama has no window, whatever its file says.
    """
    return _declares(config, "sliding_window")


def _declares(config: Any, field: str) -> bool:
    names = (vars(kind) for kind in type(config).__mro__ if kind.__module__.startswith("transformers.models."))
    return any(field in found or field in found.get("__annotations__", {}) for found in names)


def windows(config: Any) -> Sequence[int | None] | None:
    """Tokens that a token of each layer sees, itself among them; ``None`` for all before it.

    Args:
        config: the text model's configuration, as Transformers' class has completed it.

    Returns:
        A layer an entry; ``None`` where the configuration does not say it for every layer.
    """
    if not declares_window(config):
        return None
    size, layers = config.sliding_window or None, int(config.num_hidden_layers)
    if size is not None and config.model_type in BESIDE_ITSELF:
        size += 1
    types = getattr(config, "layer_types", None) if _declares(config, "layer_types") else None
    if types is None:  # Mistral's layers all have the window, whatever its file says of kinds
        return [size] * layers
    if not set(types) <= set(WINDOWED) or len(types) < layers:
        return None
    return [size if WINDOWED[kind] else None for kind in types]
