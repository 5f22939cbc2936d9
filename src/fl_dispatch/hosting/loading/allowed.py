"""Tensors that a model may leave unused and parameters that a checkpoint may leave unfilled, each with the reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...logger_manager import get_logger
from .files import EMBEDDING, HEAD

logger = get_logger(__name__)


class Allowed(NamedTuple):
    """Tensors or parameters that may be left over.

    Args:
        pattern: a pattern of whole names.
        reason: why answers are right without the tensor.
        equal: a pattern of the tensor with equal values, ``"zeros"``, or ``"order"`` for ascending values; empty for
            any values. ``"part"`` for a parameter that some tensor must fill in part.
    """

    pattern: str
    reason: str
    equal: str = ""


ZEROS, ORDER, PART = "zeros", "order", "part"
COLUMNS = ".g_idx"
"""Suffix of a ``gptq`` tensor that gives each column's group."""
UNTAKEN = (
    Allowed(r".*\brotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)", "hosts compute rotations from config.json"),
    Allowed(r".*\b(attn|attention|self_attention)\.(bias|masked_bias)", "a causal mask that old versions saved"),
    Allowed(r".*\.bias", "GPTQ's tools write biases of zeros for layers without one", ZEROS),
    Allowed(rf".*{re.escape(COLUMNS)}", "groups of GPTQ's columns in their order, which is what kernels take", ORDER),
    Allowed(HEAD, "a tied head is the embedding", EMBEDDING),
    Allowed(r"(.*\.)?(mtp|mtp_\w+|nextn)\..*", "layers that predict further tokens serve drafts alone"),
    Allowed(
        r"(.*\.)?(visual|vision|vision_\w+|vpm|resampler|connector|mlp1|\w*projector|embed_vision|image_newline)(\..*)?",
        "a model that reads text alone has no encoder of pictures",
    ),
    Allowed(
        r"(.*\.)?(audio_\w+|embed_audio|apm|time_series|talker|token2wav|code2wav|tts)(\..*)?",
        "a model that answers with text has no encoder, or no voice, of sounds",
    ),
)
"""Tensors that no host has to load."""
CACHE_SCALES = (
    Allowed(r".*\.((k|v|kv)_scale|[kv]_proj\.output_scale)", "the cache is not quantized, so it has no use for scales"),
)
"""Further tensors, for a model without parameters for scales of a KV cache."""
OF_TARGET = (
    Allowed(r"(.*\.)?(embed_tokens|lm_head|shared_head\.head)\.weight", "a model that drafts has the target's"),
)
"""Parameters of a draft model that its checkpoint may lack."""


def matching(name: str, allowed: Sequence[Allowed]) -> list[Allowed]:
    """Return the rules with a pattern that fits a name."""
    return [rule for rule in allowed if re.fullmatch(rule.pattern, name)]


def predictors(config: Any) -> tuple[Allowed, ...]:
    """Return rules for layers after a model's last one that predict more tokens, as in DeepSeek-V3.

    Args:
        config: the configuration of the model's text.
    """
    further = getattr(config, "num_nextn_predict_layers", None) or 0
    numbers = "|".join(str(config.num_hidden_layers + index) for index in range(further))
    reason = "layers that predict further tokens serve drafts alone"
    return (Allowed(rf"(.*\.)?layers\.({numbers})\..*", reason),) if further else ()


def shared_caches(config: Any) -> tuple[Allowed, ...]:
    """Return rules for parameters of layers that read another layer's cache, as the last ones of Gemma 3n do.

    Such a layer projects only queries, and a joined projection has room for keys and values that no code reads.

    Args:
        config: the configuration of the model's text.
    """
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    last = config.num_hidden_layers if shared else 0
    numbers = "|".join(map(str, range(last - shared, last)))
    reason = "the layer reads another layer's cache, and has no keys and values of its own"
    attention = rf"(.*\.)?layers\.({numbers})\.self_attn"
    rules = (
        Allowed(rf"{attention}\.qkv_proj\..*", reason, PART),
        Allowed(rf"{attention}\.(k|v)_norm\..*", reason),
    )
    return rules if shared else ()


def ignored(config: Any) -> tuple[Allowed, ...]:
    """Return rules for tensors that Transformers' class of a model ignores.

    Args:
        config: the model's configuration.
    """
    import transformers

    patterns: list[str] = []
    for name in getattr(config, "architectures", None) or ():
        try:
            patterns += getattr(getattr(transformers, name), "_keys_to_ignore_on_load_unexpected", None) or []
        except (AttributeError, ImportError, RuntimeError) as error:  # no such class, or it cannot be imported here
            logger.debug("Transformers has no class %s here: %s", name, error)
    return tuple(Allowed(rf".*(?:{pattern}).*", "Transformers' class of the model ignores it") for pattern in patterns)
