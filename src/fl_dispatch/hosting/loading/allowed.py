"""Tensors that a model may leave, and parameters that a checkpoint may, each with the reason."""

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
        pattern: of a whole name.
        reason: why the answers are right without it.
        equal: a pattern of the tensor with equal values, ``"zeros"``, or ``"order"`` for values that ascend; empty if
            any values may be left.
    """

    pattern: str
    reason: str
    equal: str = ""


ZEROS, ORDER = "zeros", "order"
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
"""Tensors that no host has to take."""
CACHE_SCALES = (
    Allowed(r".*\.((k|v|kv)_scale|[kv]_proj\.output_scale)", "the cache is not quantized, so it has no use for scales"),
)
"""Further tensors, for a model without parameters for scales of a KV cache."""
OF_TARGET = (
    Allowed(r"(.*\.)?(embed_tokens|lm_head|shared_head\.head)\.weight", "a model that drafts has the target's"),
)
"""Parameters of a model that drafts which its checkpoint need not have."""


def matching(name: str, allowed: Sequence[Allowed]) -> list[Allowed]:
    """The rules with a pattern that fits a name."""
    return [rule for rule in allowed if re.fullmatch(rule.pattern, name)]


def predictors(config: Any) -> tuple[Allowed, ...]:
    """The layers behind a model's last one that predict further tokens, as DeepSeek-V3's checkpoints have them.

    Args:
        config: the configuration of the model's text.
    """
    further = getattr(config, "num_nextn_predict_layers", None) or 0
    numbers = "|".join(str(config.num_hidden_layers + index) for index in range(further))
    reason = "layers that predict further tokens serve drafts alone"
    return (Allowed(rf"(.*\.)?layers\.({numbers})\..*", reason),) if further else ()


def ignored(config: Any) -> tuple[Allowed, ...]:
    """Tensors that Transformers' class of a model ignores when a checkpoint has them.

    Args:
        config: the model's configuration.
    """
    import transformers

    patterns: list[str] = []
    for name in getattr(config, "architectures", None) or ():
        try:
            patterns += getattr(getattr(transformers, name), "_keys_to_ignore_on_load_unexpected", None) or []
        except (AttributeError, ImportError, RuntimeError) as error:  # it has no such class, or cannot import it here
            logger.debug("Transformers has no class %s here: %s", name, error)
    return tuple(Allowed(rf".*(?:{pattern}).*", "Transformers' class of the model ignores it") for pattern in patterns)
