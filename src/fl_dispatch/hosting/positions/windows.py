"""The sliding window of each layer as Transformers reads it from a configuration, to compare with a host's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...logger_manager import get_logger

logger = get_logger(__name__)

Layer = tuple[int, int | None, Callable[[int], object]]
"""A causal layer: its number, its window in the host, and a function that sets another window."""
WINDOWED: Mapping[str, bool] = {
    "sliding_attention": True,
    "hybrid_sliding": True,
    "full_attention": False,
}
"""Kinds of layers in ``layer_types`` → whether a layer has the window."""
PLUS_ITSELF = ("cohere2", "cohere2_moe")
"""Models with windows that do not count the token itself, according to both hosts, as in their training."""


def declares_window(config: Any) -> bool:
    """Whether the configuration's class has the field ``sliding_window``.

    Transformers' models read the field only in that case: a Llama has no window, whatever its file says.
    """
    return _declares(config, "sliding_window")


def _declares(config: Any, field: str) -> bool:
    names = (vars(kind) for kind in type(config).__mro__ if kind.__module__.startswith("transformers.models."))
    return any(field in found or field in found.get("__annotations__", {}) for found in names)


def windows(config: Any) -> Sequence[int | None] | None:
    """Return the number of tokens that a token of each layer sees, including itself; ``None`` for all before it.

    Args:
        config: the text model's configuration, completed by Transformers' class.

    Returns:
        One entry per layer; ``None`` if the configuration does not define every layer.
    """
    if not declares_window(config):
        return None
    size, layers = config.sliding_window or None, int(config.num_hidden_layers)
    if size is not None and config.model_type in PLUS_ITSELF:
        size += 1
    types = getattr(config, "layer_types", None) if _declares(config, "layer_types") else None
    if types is None:  # Mistral's layers all have the window, whatever kinds its file lists
        return [size] * layers
    if not set(types) <= set(WINDOWED) or len(types) < layers:
        return None
    return [size if WINDOWED[kind] else None for kind in types]


def give_missing(config: Any, layers: Iterable[Layer], model: str, why_not: str = "") -> None:
    """Give layers the window that the configuration states, if the host's class of the model gives them none.

    A window of another size is the host's decision, and is logged.

    Args:
        config: the text model's configuration.
        layers: the causal layers of a loaded model.
        model: the host and its class, for log and errors.
        why_not: why a layer cannot be given a window, with the remedy; empty if it can.

    Raises:
        ValueError: a layer lacks its window and cannot be given one.
    """
    stated = windows(config)
    if stated is None:
        return
    differing: Counter[tuple[int | None, int | None]] = Counter()
    for number, has, give in layers:
        if not 0 <= number < len(stated) or has == (wanted := stated[number]):
            continue
        differing[has, wanted] += 1
        if has is None and wanted is not None and not why_not:
            give(wanted)
    for (has, wanted), count in differing.items():
        said = f"the configuration (sliding_window, layer_types) gives {count} layers {_tokens(wanted)}"
        if has is not None:
            logger.warning("%s, %s gives them %s, which holds", said, model, _tokens(has))
        elif why_not:
            raise ValueError(f"{said}, {model} {why_not}")
        else:
            logger.info("%s, which %s leaves out: they have it", said, model)


def _tokens(size: int | None) -> str:
    return "no window" if size is None else f"a window of {size} tokens"
