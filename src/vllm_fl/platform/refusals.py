"""The plugin's refusals: one sentence that names the first feature that cannot be served, before a model loads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fl_dispatch import get_default_manager
from fl_dispatch.devices import DeviceSpec
from fl_dispatch.devices.triton import why_no_float8, why_unserved
from fl_dispatch.hosting.quantized import experts as quantized_experts
from fl_dispatch.hosting.start.first_choices import has_kernel, more_than_references, without_graphs
from fl_dispatch.settings import get_settings

from .. import quantization
from ..attention import kv_layout
from ..compat import model_runner, models, versions
from ..compilation import compile
from ..extensions import extensions
from ..host import HOST
from ..layers import delta_net, mamba2, short_conv
from . import config, invariance

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

EXPERT_LAYERS = {
    "UnquantizedFusedMoEMethod": ("fused_moe",),
    "MoERunner": ("topk_softmax", "topk_sigmoid", "grouped_topk"),
}
"""The layers that every mixture of experts needs, with their operators (see :mod:`vllm_fl.layers.mixture`)."""
STATE_LAYERS = {
    "QwenGatedDeltaNetAttention": delta_net.OPERATORS,
    "MambaMixer": mamba2.OPERATORS,
    "MambaMixer2": mamba2.OPERATORS,
    "ShortConv": short_conv.OPERATORS,
}
"""Our layers with a state, with their operators."""
STATE_MODELS = {
    "Qwen3NextForCausalLM": "QwenGatedDeltaNetAttention",
    "Qwen3_5ForCausalLM": "QwenGatedDeltaNetAttention",
    "Qwen3_5MoeForCausalLM": "QwenGatedDeltaNetAttention",
    "Qwen3_5ForConditionalGeneration": "QwenGatedDeltaNetAttention",
    "Qwen3_5MoeForConditionalGeneration": "QwenGatedDeltaNetAttention",
    "MambaForCausalLM": "MambaMixer",
    "FalconMambaForCausalLM": "MambaMixer",
    "JambaForCausalLM": "MambaMixer",
    "Mamba2ForCausalLM": "MambaMixer2",
    "GraniteMoeHybridForCausalLM": "MambaMixer2",
    "FalconH1ForCausalLM": "MambaMixer2",
    "NemotronHForCausalLM": "MambaMixer2",
    "Zamba2ForCausalLM": "MambaMixer2",
    "Lfm2ForCausalLM": "ShortConv",
    "Lfm2MoeForCausalLM": "ShortConv",
}
"""Models with our layers for all states: architecture → the class of these layers."""
SPARSE_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV32MTPModel")
"""Models with our indexer; the last one drafts for either of the others."""
SPARSE_DRAFTS = ("ngram", "mtp")
"""Speculation by these models."""
ADAPTED_EXPERTS = "FusedMoEWithLoRA in lora/layers/fused_moe.py runs vLLM's own kernels of experts alone"
"""vLLM's line."""
STATES = "models with layers that keep a state"
ALL2ALL = "allgather_reducescatter"
"""The token exchange between experts that uses only a communicator's own collectives."""
SPECULATION = ("ngram", *model_runner.DRAFTS)

BOTH_WAYS = {
    "dflash": "use_non_causal in v1/worker/gpu/spec_decode/dflash/utils.py",
    "dspark": "use_non_causal in v1/worker/gpu/spec_decode/dspark/utils.py",
}
"""Methods with drafts that see later drafts, which our paged-cache operators cannot compute → vLLM's line."""


def refuse_unsupported(vllm_config: VllmConfig, device: DeviceSpec) -> None:
    """Raise ``ValueError`` for the first feature that cannot be served."""
    model = vllm_config.model_config
    asked = [*_engine_features(vllm_config, device), *([] if model is None else _model_features(model, device))]
    for present, feature in asked:
        if present:
            where = "" if model is None else f" (model {model.model})"
            raise ValueError(f"vllm_fl does not support {feature} on {device.name} yet{where}")
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and "v2" not in device.model_runners:
        raise ValueError(f"vllm_fl runs vLLM's V1 model runner on {device.name}; unset VLLM_USE_V2_MODEL_RUNNER")
    if model is not None:
        _check_attention_class(config.attention_backend_path(model.use_mla))
        _refuse_native_layers(model)
    _refuse_layers_switched_off(vllm_config)
    compile.refuse_missing_compiler(vllm_config, device)


def _engine_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of an engine, each with whether it is asked for."""
    parallel, compiled = vllm_config.parallel_config, compile.is_compiled(vllm_config)
    lacking = compile.lacked_by_compiled_models(vllm_config) if compiled else []
    speculation = getattr(vllm_config.speculative_config, "method", None)
    return [
        (speculation not in (None, *SPECULATION), _speculation(speculation)),
        *_draft_features(vllm_config, device),
        *_cache_features(vllm_config, device),
        (
            vllm_config.lora_config is not None and config.has_experts(vllm_config),
            f"LoRA on mixture-of-experts models ({ADAPTED_EXPERTS})",
        ),
        *_sparse_features(vllm_config, device),
        *(feature for extension in extensions() for feature in extension.unserved(vllm_config)),
        *(_context_features(vllm_config, device) if parallel.decode_context_parallel_size > 1 else ()),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism"),
        (parallel.use_ubatching, "dual-batch overlap"),
        *invariance.features(vllm_config),
        (
            parallel.all2all_backend != ALL2ALL and config.has_experts(vllm_config),
            f"the all-to-all backend {parallel.all2all_backend} (only {ALL2ALL})",
        ),
        (vllm_config.lora_config is not None and models.has_states(vllm_config.model_config), f"LoRA on {STATES}"),
        (
            vllm_config.lora_config is not None
            and device.accelerator
            and getattr(vllm_config.model_config, "enable_sleep_mode", False)
            and not versions.is_tested(),
            f"LoRA with sleep mode with vLLM {versions.host_version()}",
        ),
        (
            device.is_foreign
            and bool(why_unserved())
            and models.has_states(vllm_config.model_config)
            and model_runner.choice(vllm_config).runner == "V1",
            f"{STATES} by the V1 model runner without Triton",
        ),
        *(_drafts_for_states(vllm_config, device) if speculation is not None else ()),
        (
            device.graphs and getattr(vllm_config.model_config, "sleep_mode_offload_cudagraph", False),
            "graphs that leave the device while an engine sleeps (sleep_mode_offload_cudagraph)",
        ),
        *lacking,
        (parallel.world_size > 1 and compiled and get_settings().flagcx_path is not None, "FlagCX in compiled models"),
    ]


def _context_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the features that are not served if ranks divide a cache by tokens."""
    model, divided = vllm_config.model_config, "decode context parallelism"
    runner = model_runner.choice(vllm_config)
    return [
        (device.accelerator, divided),
        (runner.runner == "V1", f"{divided} by the V1 model runner ({runner.why})"),
        (model.use_mla, "decode context parallelism of latent attention (no log-sum-exp in decoding)"),
        (models.has_states(model), f"{divided} of {STATES}"),
        (vllm_config.cache_config.cache_dtype in kv_layout.QUANTIZED_DTYPES, f"{divided} of a quantized KV cache"),
        (vllm_config.speculative_config is not None, f"{divided} with speculative decoding"),
        (vllm_config.kv_transfer_config is not None, f"{divided} with KV transfer"),
    ]


def _speculation(method: str | None) -> str:
    """Return a sentence on unserved speculation, with vLLM's line that asks for more than our attention has."""
    line = BOTH_WAYS.get(method or "")
    only = f"only with {', '.join(SPECULATION)}"
    return f"speculative decoding with '{method}' ({f'its drafts attend both ways: {line}' if line else only})"


def _cache_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of a KV cache."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    cache_type = f"a KV cache of type {cache.cache_dtype}"
    quantized = cache.cache_dtype in kv_layout.QUANTIZED_DTYPES
    fp8 = cache.cache_dtype in kv_layout.FP8_DTYPES
    uncompiled = why_no_float8(device.capability(0)) if fp8 else ""
    int8, width = cache.cache_dtype == kv_layout.INT8_DTYPE, 0 if model is None else model.get_head_size()
    return [
        (cache.cache_dtype not in (*kv_layout.PLAIN_DTYPES, *kv_layout.QUANTIZED_DTYPES), cache_type),
        (fp8 and not device.float8, cache_type),
        (int8 and not _attends_over_int8(device), cache_type),
        (int8 and bool(width % kv_layout.SCALE_BYTES), f"{cache_type} for heads of {width} elements"),
        (bool(uncompiled), f"{cache_type} ({uncompiled})"),
        (quantized and not versions.is_tested(), f"{cache_type} with vLLM {versions.host_version()}"),
        (int8 and model is not None and model.use_mla, f"{cache_type} for latent attention"),
        (quantized and bool(cache.kv_cache_dtype_skip_layers), f"{cache_type} for some layers only"),
        (quantized and models.has_states(model), f"{cache_type} for {STATES}"),
        (getattr(cache, "use_replayssm", False), "states that are replayed from a buffer (use_replayssm)"),
    ]


def _sparse_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of sparse latent attention."""
    from vllm.platforms import current_platform

    if not models.has_indexer(vllm_config.model_config):
        return []
    attention, sparse = vllm_config.attention_config, "sparse latent attention"
    speculation = getattr(vllm_config.speculative_config, "method", None)
    return [
        (not current_platform.is_out_of_tree(), f"{sparse} on vLLM's own platform (VLLM_FL_NATIVE_PLATFORM)"),
        (not versions.is_tested(), f"{sparse} with vLLM {versions.host_version()}"),
        (speculation is not None and device.accelerator, f"speculative decoding by {sparse}"),
        (speculation not in (None, *SPARSE_DRAFTS), f"speculative decoding with '{speculation}' by {sparse}"),
        (vllm_config.kv_transfer_config is not None, f"KV transfer with {sparse}"),
        (attention.hisparse_config is not None, f"{sparse} with a cache on the host (hisparse_config)"),
        (
            attention.indexer_kv_dtype not in ("auto", "bf16", "fp8"),
            f"index keys of type {attention.indexer_kv_dtype}",
        ),
    ]


def _attends_over_int8(device: DeviceSpec) -> bool:
    """Whether an implementation other than the reference, which waits in each layer, takes the scales."""
    given = kv_layout.QUANTIZED_DTYPES[kv_layout.INT8_DTYPE]
    return not device.accelerator or all(has_kernel(op, given) for op in config.ATTENTION_OPERATORS)


def _draft_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of drafts by a model."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method not in model_runner.DRAFTS:
        return []
    runner = model_runner.choice(vllm_config)
    draft = speculation.draft_model_config
    return [
        (runner.runner == "V1", f"drafts of a model by the V1 model runner ({runner.why})"),
        (device.accelerator and model_runner.has_several_predictors(speculation), "drafts of several predictors"),
        (models.has_states(draft), "a draft with layers that keep a state"),
        (
            models.has_indexer(draft) and models.listed(draft) != models.listed(vllm_config.model_config),
            "a draft that lists another number of tokens than its model",
        ),
        *((lacking, f"a draft with {named}") for lacking, named in _model_features(draft, device)),
    ]


def _drafts_for_states(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return speculation that fails for a model with states, because a state must go back to accepted tokens."""
    model = vllm_config.model_config
    if not models.has_states(model):
        return []
    runner, layer = model_runner.choice(vllm_config), STATE_MODELS.get(model.architecture)
    return [
        (runner.runner == "V1", f"speculative decoding by {STATES} by the V1 model runner ({runner.why})"),
        (device.accelerator and bool(why_unserved()), f"speculative decoding by {STATES} without Triton"),
        (
            layer == "MambaMixer",
            "speculation by models with Mamba 1 (vLLM keeps no state a draft: mamba1_state_shape in mamba_utils.py)",
        ),
    ]


def _serves_states(model: ModelConfig, device: DeviceSpec) -> bool:
    """Whether the layers with a state are ours, and vLLM's kernels next to them run here or have forms.

    Forms exist in main memory, and on accelerators that vLLM does not know. With Triton each operator of the layers has
    an implementation besides the reference, which waits for the device in every layer; without Triton the reference may
    run.
    """
    layer = STATE_MODELS.get(model.architecture)
    if layer is None or not versions.is_tested():
        return False
    if not device.accelerator:
        return True
    return device.is_foreign if why_unserved() else all(map(_has_more_than_references, STATE_LAYERS[layer]))


def _has_more_than_references(op_name: str) -> bool:
    """Whether an operator has an available implementation besides the reference; ``warm_up`` checks its calls."""
    manager = get_default_manager()
    manager.ensure_initialized()
    if not manager.registry.get_implementations(op_name):
        return False
    return more_than_references(manager.explain(op_name))


def _model_features(model: ModelConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of a model, or of a draft model."""
    from vllm.platforms import current_platform

    return [
        (
            model.is_encoder_decoder and device.accelerator and (device.is_foreign or "v2" not in device.model_runners),
            "encoder-decoder models",
        ),
        *_quantization_features(model, device),
        (
            models.has_states(model) and not _serves_states(model, device),
            f"the layers with a state of {model.architecture}",
        ),
        (models.has_indexer(model) and model.architecture not in SPARSE_MODELS, "this model's sparse attention"),
        (
            models.is_unbalanced(model) and not current_platform.is_out_of_tree(),
            f"{model.architecture} in float16 on vLLM's own platform (its MoERunner scales the shared experts wrongly)",
        ),
    ]


def _experts_wait() -> bool:
    """Whether references come first for quantized experts, which wait for an accelerator in each layer."""
    return bool(without_graphs(quantized_experts.OPERATORS))


def _quantization_features(model: ModelConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of a quantized checkpoint."""
    from vllm.platforms import current_platform

    if model.quantization is None or not current_platform.is_out_of_tree():  # vLLM's own platform has its own kernels
        return []
    name = quantization.SERVED[model.quantization].name
    return [
        (model.use_mla and HOST.name not in device.quantized_latent, f"latent attention quantized by '{name}'"),
        (model.is_moe and device.accelerator and _experts_wait(), f"experts quantized by '{name}'"),
        (
            STATE_MODELS.get(model.architecture) == "MambaMixer",
            f"models with layers of Mamba 1 quantized by '{name}' (vLLM's layer has no quantized products)",
        ),
        (model.model_arch_config.quantization_config is None, f"'{name}' for a checkpoint that is not quantized"),
    ]


def _refuse_native_layers(model: ModelConfig) -> None:
    """Refuse lists that leave layers to vLLM for which it has no code here."""
    settings = get_settings()
    needed = [("experts", one) for one in EXPERT_LAYERS.items() if model.is_moe]
    if (layer := STATE_MODELS.get(model.architecture)) is not None:
        needed.append(("layers with a state", (layer, STATE_LAYERS[layer])))
    for what, (name, operators) in needed:
        if not any(settings.registers(name, operator) for operator in operators):
            raise ValueError(
                f"model {model.model} has {what}, and vLLM has no code for that on an out-of-tree platform, "
                f"but a list or a switch leaves out {name} ({', '.join(operators)})"
            )


def _check_attention_class(path: str) -> None:
    """Refuse a name that is not one of a class of attention; ``path``: the class's full name."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backend import AttentionBackend

    chosen = get_default_manager().get_selected_impl_id("attention_backend")
    try:
        found = resolve_obj_by_qualname(path)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"'{chosen}' of 'attention_backend' names {path!r}, which cannot be imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        raise ValueError(f"'{chosen}' of 'attention_backend' names {path!r}, which is no AttentionBackend of vLLM")


def _refuse_layers_switched_off(vllm_config: VllmConfig) -> None:
    """Refuse ``custom_ops`` that leave every layer to vLLM."""
    settings, asked = get_settings(), set(vllm_config.compilation_config.custom_ops)
    if (
        "none" in asked
        and settings.policy.enabled
        and settings.oot_enabled
        and not any(op.startswith("+") for op in asked)
    ):
        raise ValueError(
            "custom_ops=['none'] would leave every layer to vLLM's own code; set VLLM_FL_OOT_ENABLED=0 if that is meant"
        )
