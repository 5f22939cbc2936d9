"""Batch invariance in an engine: features that ``VLLM_BATCH_INVARIANT=1`` cannot serve, and why.

The core admits only implementations that declare ``batch_invariant``. So each operator of a model needs one, and other
computations over several rows must not let rows affect each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_dispatch import get_default_manager, get_policy
from fl_dispatch.settings import get_settings

from ..attention import kv_layout
from ..compat import models
from . import config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ASKED = "VLLM_BATCH_INVARIANT=1"
EVERYWHERE = ("attention_backend", "linear")
EXPERTS = ("topk_softmax", "topk_sigmoid", "grouped_topk", "fused_moe")
ROWS = ("linear", "rms_norm", "gemma_rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding", "fused_moe")
"""The operators that layers must run as ours."""
SHOWN = frozenset(
    ("Gemma2ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
)
"""The models with answers that were compared bit by bit. Other models may have code of their own; for example, the last
bits of ``F.sigmoid`` depend on an element's place."""


def features(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    """Return features that are not batch-invariant, each with whether it is requested."""
    if not get_policy().batch_invariant:
        return []
    from ..layers.classes import LAYER_CLASSES

    parallel, model, experts = vllm_config.parallel_config, vllm_config.model_config, config.has_experts(vllm_config)
    settings, compilation = get_settings(), vllm_config.compilation_config
    rows = [row for row in LAYER_CLASSES if set(row.operators) & set(ROWS)]
    left = [row.name for row in rows if not any(settings.registers(row.name, op) for op in row.operators)]
    quantized_cache = vllm_config.cache_config.cache_dtype in kv_layout.QUANTIZED_DTYPES
    switched_off = [op for op in compilation.custom_ops if op == "none" or op.startswith("-")]
    found = [
        *((True, f"{ASKED} (no implementation of {op} declares batch_invariant)") for op in _lacking(vllm_config)),
        (bool(left), f"{ASKED} with layers that are left to vLLM ({', '.join(left)})"),
        (bool(switched_off), f"{ASKED} with layers that are left to vLLM (custom_ops={switched_off})"),
        (parallel.world_size > 1, f"{ASKED} with several ranks"),
        (parallel.data_parallel_size > 1 and experts, f"{ASKED} with experts on several ranks"),
        (vllm_config.speculative_config is not None, f"{ASKED} with speculative decoding"),
        (vllm_config.lora_config is not None, f"{ASKED} with LoRA"),
        (quantized_cache, f"{ASKED} with a quantized KV cache"),
    ]
    if model is not None:
        unshown = sorted({model.architecture} - SHOWN)
        gate = getattr(model.hf_config, "shared_expert_intermediate_size", 0)
        found += [
            (model.runner_type == "pooling", f"{ASKED} with pooling models"),
            (model.quantization is not None, f"{ASKED} with quantized weights"),
            (models.has_states(model), f"{ASKED} with {models.STATES}"),
            (model.is_multimodal_model, f"{ASKED} with multimodal models"),
            (bool(unshown), f"{ASKED} with {', '.join(unshown)} (it was shown for {', '.join(sorted(SHOWN))})"),
            (bool(gate), f"{ASKED} with a gate of shared experts"),
        ]
    return found


def _lacking(vllm_config: VllmConfig) -> list[str]:
    """Return the model's operators without a batch-invariant implementation here."""
    model = vllm_config.model_config
    attention = config.LATENT_OPERATORS if model is not None and model.use_mla else config.ATTENTION_OPERATORS
    needed = (*EVERYWHERE, *attention, *(EXPERTS if config.has_experts(vllm_config) else ()))
    return [op for op in needed if not get_default_manager().first_choices(op)]
