"""The attention layers of a model: whether they can be served, and their operators, bound for the layers' prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from torch import nn

from fl_dispatch import bind_op
from fl_dispatch.hosting.layers.attribute import Attached
from fl_dispatch.hosting.positions import windows


@dataclass(frozen=True)
class BoundOperators:
    """An attention layer's operators, bound for its prefix, which is their scope."""

    scope: str | None
    write: Callable[..., Any]
    attend: Callable[..., Any]
    attend_latent: Callable[..., Any]
    attend_listed: Callable[..., Any]


NAMES = ("kv_cache_write", "paged_attention", "mla_decode", "mla_sparse")
OPERATORS = Attached[BoundOperators]("fl_operators")


def bind(layer: RadixAttention, scope: str | None) -> None:
    """Bind a layer's operators for its prefix."""
    OPERATORS.give(layer, BoundOperators(scope, *(bind_op(name, scope) for name in NAMES)))


def refusal(layer: RadixAttention) -> str | None:
    """Return why a layer's attention cannot run here, or ``None``."""
    if layer.is_cross_attention:
        return "cross attention"
    if layer.attn_type is AttentionType.DECODER_BIDIRECTIONAL:
        return "attention to later tokens in a decoder"
    if layer.pos_encoding_mode != "NONE":
        return f"attention with position encoding '{layer.pos_encoding_mode}'"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        return f"attention scores limited by '{layer.logit_capping_method}'"
    if layer.xai_temperature_len > 0:
        return "attention with a temperature by length"
    return None


def transformers_layers(model: nn.Module) -> Iterator[tuple[str, RadixAttention]]:
    """Yield the layers of ``--model-impl transformers``, which the model keeps in a dictionary outside its modules.

    Each gets a prefix below the Hugging Face attention that calls it.
    """
    aside: dict[int, RadixAttention] = getattr(model, "attention_instances", {})
    for prefix, module in model.named_modules():
        if type(module).__name__.endswith("Attention") and (number := getattr(module, "layer_idx", None)) in aside:
            yield f"{prefix}.attn", aside[number]


def layers(model: nn.Module) -> Iterator[tuple[str, RadixAttention]]:
    """Yield every attention layer with a prefix."""
    for prefix, module in model.named_modules():
        if isinstance(module, RadixAttention):
            yield prefix, module
    yield from transformers_layers(model)


# -- windows ----------------------------------------------------------------------------------------------------------


def window(layer: RadixAttention) -> int | None:
    """Return the number of tokens that a token of the layer sees, including itself; ``None`` for all before it."""
    before = layer.sliding_window_size  # the tokens before the token itself
    return None if before is None or before < 0 else int(before) + 1


def give_windows(model: nn.Module, config: Any, host_backends: list[str]) -> None:
    """Give causal layers the window that the configuration states, if SGLang's class gives them none.

    Args:
        model: a loaded model.
        config: its text model's configuration.
        host_backends: SGLang's own attention backends in force, which are not prepared for these windows.

    Raises:
        ValueError: a window is missing, and one of SGLang's own backends attends.
    """

    def give(layer: RadixAttention, size: int) -> None:
        layer.sliding_window_size = size - 1

    causal = (
        (layer.layer_id, window(layer), partial(give, layer))
        for _, layer in layers(model)
        if layer.attn_type is AttentionType.DECODER
    )
    why_not = (
        f"and its attention backend '{host_backends[0]}' have none for them: "
        "leave --attention-backend unset, or give 'fl'"
        if host_backends
        else ""
    )
    windows.give_missing(config, causal, f"SGLang's {type(model).__name__}", why_not)
