"""Models that vLLM serves wrongly, models with a state per request, and models with sparse latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import ModelConfig

UNBALANCED_IN_FLOAT16 = ("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration", "LagunaForCausalLM")
"""Models with decoder layers that do not divide by the scale of the routed experts in float16. vLLM's runner of experts
then divides the shared experts by it, so that sums stay small, and expects each layer to divide the rest, as DeepSeek's
layers do. For these models our runner multiplies instead."""
STATES = "models with layers that keep a state"
"""The words for such models in errors."""


def is_unbalanced(model: ModelConfig) -> bool:
    """Whether the model is in float16, and vLLM's own runner of experts would give wrong tokens."""
    scale = getattr(model.hf_text_config, "routed_scaling_factor", None)
    return model.dtype == torch.float16 and model.architecture in UNBALANCED_IN_FLOAT16 and scale != 1.0


def has_states(model: ModelConfig | None) -> bool:
    """Whether some layers keep a state for each request instead of keys and values."""
    return model is not None and bool(model.is_hybrid or model.is_attention_free)


def has_indexer(model: ModelConfig | None) -> bool:
    """Whether a model has sparse latent attention."""
    return model is not None and hasattr(model.hf_text_config, "index_topk")


def listed(model: ModelConfig | None) -> int | None:
    """Return the most tokens that a query of sparse latent attention attends to; ``None`` for other attention."""
    return None if model is None else getattr(model.hf_text_config, "index_topk", None)
