"""Rotations and windows as a model's configuration states them, for vLLM's classes that read it differently.

Rotary tables and missing windows are corrected once a model is loaded. Rotations that no table can hold, and windows
that Transformers' class of the model does not know, are handled before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fl_dispatch.hosting.positions import configurations, rotary_tables, windows
from fl_dispatch.logger_manager import get_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = get_logger(__name__)
TEMPERATURE = "attn_temperature_tuning"


def settle(vllm_config: VllmConfig) -> None:
    """Change or refuse settings of rotations that cannot be served, before a model loads.

    Raises:
        ValueError: the requested length of texts exceeds a rotation's limit.
    """
    model = vllm_config.model_config
    if model is None:
        return
    text = model.hf_text_config
    window = getattr(text, "sliding_window", None)
    if window and configurations.is_of_transformers(text) and not windows.declares_window(text):
        text.sliding_window = vllm_config.cache_config.sliding_window = None
        logger.info(
            "sliding_window: none instead of %d, because %s has no such field, so its network has no window",
            *(window, type(text).__name__),
        )
    _keep_temperature(model)
    longest = rotary_tables.limit(text)
    if longest is None or model.max_model_len <= longest:
        return
    if model.original_max_model_len not in (None, -1):
        raise ValueError(rotary_tables.too_long(model.max_model_len, longest, f"--max-model-len {longest}"))
    logger.warning(rotary_tables.too_long(model.max_model_len, longest, f"--max-model-len is {longest} now"))
    model.max_model_len = vllm_config.scheduler_config.max_model_len = longest


def _keep_temperature(model: ModelConfig) -> None:
    """Scale the queries of Llama 4's layers without rotation as the configuration states, unless a user decides.

    vLLM's class reads only the generation configuration, and without an entry scales none up to 32,768 tokens.
    """
    stated = getattr(model.hf_text_config, TEMPERATURE, None)
    if stated is None or TEMPERATURE in {**model.try_get_generation_config(), **model.override_generation_config}:
        return
    model.override_generation_config[TEMPERATURE] = bool(stated)
    if stated and model.max_model_len > getattr(model.hf_text_config, "floor_scale", 8192):
        logger.info("%s: on, because the model's configuration says so", TEMPERATURE)


def correct(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Give the layers of a loaded model the tables that its configuration states."""
    stated, length = vllm_config.model_config, vllm_config.model_config.max_model_len
    config = stated.hf_text_config
    if not stated.hf_overrides:
        config = configurations.as_transformers_reads(config, stated.model, stated.revision)
    layers = [*model.named_modules(remove_duplicate=False)]
    with_table = ((prefix, layer) for prefix, layer in layers if _is_table(getattr(layer, "cos_sin_cache", None)))
    rotary_tables.correct(with_table, config, length)
    long = ((prefix, layer) for prefix, layer in layers if hasattr(layer, "long_short_cos_sin_cache"))
    rotary_tables.correct_long(long, config, length)


def give_windows(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Give the layers of a loaded model the window that its configuration states, if vLLM's class has none.

    The layer masks keys; its cache keeps all tokens, as vLLM planned.

    Raises:
        ValueError: a window is missing, and vLLM's own attention runs.
    """
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.attention.backend import AttentionType

    from ..attention.dense import AttentionFLImpl

    if vllm_config.model_config.disable_sliding_window:  # texts are no longer than the window
        return
    causal, foreign = [], ""
    for prefix, layer in model.named_modules():
        numbers = [int(part) for part in prefix.split(".") if part.isdecimal()]
        if not isinstance(layer, Attention) or layer.attn_type != AttentionType.DECODER or len(numbers) != 1:
            continue
        if not isinstance(layer.impl, AttentionFLImpl):
            foreign = type(layer.impl).__name__
        causal.append((numbers[0], layer.sliding_window, partial(setattr, layer.impl, "sliding_window")))
    why_not = f"and its {foreign} have none for them: leave --attention-backend unset" if foreign else ""
    windows.give_missing(vllm_config.model_config.hf_text_config, causal, f"vLLM's {type(model).__name__}", why_not)


def _is_table(found: object) -> bool:
    return isinstance(found, Tensor) and found.ndim == 2
