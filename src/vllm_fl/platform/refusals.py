"""The plugin's refusals: one sentence that names the first feature that cannot be served, before a model loads.

:data:`TOPICS` lists them by what a user asked for; :mod:`.model_refusals` has those that depend on a model's layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fl_dispatch import get_default_manager
from fl_dispatch.devices import DeviceSpec
from fl_dispatch.devices.triton import why_no_float8
from fl_dispatch.hosting.start.first_choices import has_kernel
from fl_dispatch.settings import get_settings

from ..attention import kv_layout
from ..compat import model_runner, models, versions
from ..compat.models import STATES
from ..compilation import compile
from ..extensions import extensions
from ..host import HOST
from . import config, invariance
from .model_refusals import model_features, refuse_native_layers, sparse_features, state_features

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ADAPTED_EXPERTS = "FusedMoEWithLoRA in lora/layers/fused_moe.py runs vLLM's own kernels of experts alone"
"""vLLM's line."""
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
    where = "" if model is None else f" (model {model.model})"
    for topic in TOPICS:
        for present, feature in topic(vllm_config, device):
            if present:
                raise ValueError(f"vllm_fl does not support {feature} on {device.name} yet{where}")
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and "v2" not in device.model_runners:
        raise ValueError(f"vllm_fl runs vLLM's V1 model runner on {device.name}; unset VLLM_USE_V2_MODEL_RUNNER")
    if model is not None:
        _check_attention_class(config.attention_backend_path(model.use_mla))
        refuse_native_layers(model)
    _refuse_layers_switched_off(vllm_config)
    compile.refuse_missing_compiler(vllm_config, device)


def _draft_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of speculative decoding."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        return []
    if speculation.method not in model_runner.DRAFTS:
        return [(speculation.method not in SPECULATION, _speculation(speculation.method))]
    runner, unproven = model_runner.choice(vllm_config), HOST.name not in device.verified
    eager = not (compile.is_compiled(vllm_config) or compile.is_captured(vllm_config))
    draft = speculation.draft_model_config
    return [
        (runner.runner == "V1", f"drafts of a model by the V1 model runner ({runner.why})"),
        (
            model_runner.has_several_predictors(speculation) and (unproven or (device.accelerator and not eager)),
            "drafts of several predictors",
        ),
        (models.has_states(draft), "a draft with layers that keep a state"),
        (
            models.has_indexer(draft) and models.listed(draft) != models.listed(vllm_config.model_config),
            "a draft that lists another number of tokens than its model",
        ),
        *((lacking, f"a draft with {named}") for lacking, named in model_features(draft, device)),
    ]


def _speculation(method: str) -> str:
    """Return a sentence on unserved speculation, with vLLM's line that asks for more than our attention has."""
    line = BOTH_WAYS.get(method)
    only = f"only with {', '.join(SPECULATION)}"
    return f"speculative decoding with '{method}' ({f'its drafts attend both ways: {line}' if line else only})"


def _adapter_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of LoRA."""
    if vllm_config.lora_config is None:
        return []
    model, sleeps = vllm_config.model_config, getattr(vllm_config.model_config, "enable_sleep_mode", False)
    return [
        (config.has_experts(vllm_config), f"LoRA on mixture-of-experts models ({ADAPTED_EXPERTS})"),
        (models.has_states(model), f"LoRA on {STATES}"),
        (
            device.accelerator and sleeps and not versions.is_tested(),
            f"LoRA with sleep mode with vLLM {versions.host_version()}",
        ),
    ]


def _rank_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of several ranks."""
    parallel, compiled = vllm_config.parallel_config, compile.is_compiled(vllm_config)
    return [
        *(_context_features(vllm_config, device) if parallel.decode_context_parallel_size > 1 else ()),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism"),
        (parallel.use_ubatching, "dual-batch overlap"),
        (
            parallel.all2all_backend != ALL2ALL and config.has_experts(vllm_config),
            f"the all-to-all backend {parallel.all2all_backend} (only {ALL2ALL})",
        ),
        (parallel.world_size > 1 and compiled and get_settings().flagcx_path is not None, "FlagCX in compiled models"),
    ]


def _context_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the features that are not served if ranks divide a cache by tokens."""
    model, parallel, divided = vllm_config.model_config, vllm_config.parallel_config, "decode context parallelism"
    runner = model_runner.choice(vllm_config)
    return [
        (HOST.name not in device.verified, divided),
        (runner.runner == "V1", f"{divided} by the V1 model runner ({runner.why})"),
        (models.has_indexer(model), f"{divided} of sparse latent attention"),
        (bool(parallel.dcp_q_replicate), f"{divided} with a copy of the queries (dcp_q_replicate)"),
        (parallel.dcp_comm_backend not in (None, "ag_rs"), f"{divided} by '{parallel.dcp_comm_backend}'"),
        (models.has_states(model), f"{divided} of {STATES}"),
        (vllm_config.cache_config.cache_dtype in kv_layout.QUANTIZED_DTYPES, f"{divided} of a quantized KV cache"),
        (vllm_config.speculative_config is not None, f"{divided} with speculative decoding"),
        (vllm_config.kv_transfer_config is not None, f"{divided} with KV transfer"),
    ]


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


def _attends_over_int8(device: DeviceSpec) -> bool:
    """Whether an implementation other than the reference, which waits in each layer, takes the scales."""
    given = kv_layout.QUANTIZED_DTYPES[kv_layout.INT8_DTYPE]
    return not device.accelerator or all(has_kernel(op, given) for op in config.ATTENTION_OPERATORS)


def _graph_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of compiled models and graphs."""
    return [
        (
            device.graphs and getattr(vllm_config.model_config, "sleep_mode_offload_cudagraph", False),
            "graphs that leave the device while an engine sleeps (sleep_mode_offload_cudagraph)",
        ),
        *(compile.lacked_by_compiled_models(vllm_config) if compile.is_compiled(vllm_config) else ()),
    ]


TOPICS: Sequence[Callable[[VllmConfig, DeviceSpec], Sequence[tuple[bool, str]]]] = (
    _draft_features,
    _cache_features,
    _adapter_features,
    sparse_features,
    lambda vllm_config, _: [feature for extension in extensions() for feature in extension.unserved(vllm_config)],
    _rank_features,
    lambda vllm_config, _: invariance.features(vllm_config),
    state_features,
    _graph_features,
    lambda vllm_config, device: model_features(vllm_config.model_config, device),
)
"""Functions of a configuration and a device; each returns unserved features with whether they are asked for."""


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
