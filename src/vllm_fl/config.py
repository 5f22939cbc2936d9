"""Refusals, changes and additions of the plugin in vLLM's configuration, before a model loads.

A refusal is one sentence that names the feature; a change is logged with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fl_dispatch import ConfigError, NoImplementationError, OpImpl, call_op, get_default_manager
from fl_dispatch.devices import TRITON, DeviceSpec
from fl_dispatch.hosting import collectives, handover
from fl_dispatch.hosting.first_choices import without_graphs
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.ops import OPERATORS
from fl_dispatch.settings import Settings, get_settings

from . import compile, cores, delta_net, kv_layout, quantization, startup
from .compat import attention_class, model_runner, models, versions
from .host import HOST

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = get_logger(__name__)

CPU_WORKER = "vllm_fl.worker_cpu.CPUWorkerFL"
GPU_WORKER = "vllm_fl.worker_gpu.GPUWorkerFL"
WORKERS_KEY = "workers_here"
EXPERT_LAYERS = {
    "UnquantizedFusedMoEMethod": ("fused_moe",),
    "MoERunner": ("topk_softmax", "topk_sigmoid", "grouped_topk"),
}
"""The layers without which no mixture of experts runs, with their operators (see ``moe``)."""
STATE_LAYERS = {"QwenGatedDeltaNetAttention": delta_net.OPERATORS}
"""The layers without which no gated delta net runs, with their operators."""
DELTA_NETS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""Models whose layers with a state are all among those."""
STATES = "models with state-space or linear-attention layers"
ALL2ALL = "allgather_reducescatter"
"""The exchange of tokens between experts that is made of a communicator's own collectives."""
ATTENTION_OPERATORS = ("kv_cache_write", "paged_attention")
LATENT_OPERATORS = ("kv_cache_write", "mla_decode", "mla_prefill")
EXPERT_OPERATORS = ("topk_softmax", "topk_sigmoid", "grouped_topk", "moe_align_block_size", "fused_moe", "moe_sum")
SPECULATION = ("ngram", *model_runner.DRAFTS)


# -- refusals ---------------------------------------------------------------------------------------------------------


def refuse_unsupported(vllm_config: VllmConfig, device: DeviceSpec) -> None:
    """Raise ``ValueError`` for the first feature that cannot be served."""
    model = vllm_config.model_config
    asked = [*_engine_features(vllm_config, device), *([] if model is None else _model_features(model, device))]
    for present, feature in asked:
        if present:
            where = "" if model is None else f" (model {model.model})"
            raise ValueError(f"vllm_fl does not support {feature} on {device.name} yet{where}")
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and not model_runner.serves_v2(device):
        raise ValueError(f"vllm_fl runs vLLM's V1 model runner on {device.name}; unset VLLM_USE_V2_MODEL_RUNNER")
    if model is not None:
        _check_attention_class(attention_backend_path(model.use_mla))
        _refuse_native_layers(model)
    cache_space()
    collectives.refuse_missing_library(device.torch_type)
    _refuse_layers_switched_off(vllm_config)
    compile.refuse_missing_compiler(vllm_config, device)


def _engine_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    parallel, compiled = vllm_config.parallel_config, compile.is_compiled(vllm_config)
    lacking = compile.lacked_by_compiled_models(vllm_config) if compiled else []
    speculation = getattr(vllm_config.speculative_config, "method", None)
    return [
        (
            speculation not in (None, *SPECULATION),
            f"speculative decoding with '{speculation}' (only with {', '.join(SPECULATION)})",
        ),
        *_draft_features(vllm_config, device),
        *_cache_features(vllm_config, device),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism"),
        (parallel.enable_dbo, "dual-batch overlap"),
        (
            parallel.all2all_backend != ALL2ALL and _has_experts(vllm_config),
            f"the all-to-all backend {parallel.all2all_backend} (only {ALL2ALL})",
        ),
        (vllm_config.lora_config is not None and _has_experts(vllm_config), "LoRA on mixture-of-experts models"),
        (vllm_config.lora_config is not None and _has_states(vllm_config.model_config), f"LoRA on {STATES}"),
        (speculation is not None and _has_states(vllm_config.model_config), f"speculative decoding by {STATES}"),
        *lacking,
        (parallel.world_size > 1 and compiled and get_settings().flagcx_path is not None, "FlagCX in compiled models"),
    ]


def _cache_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    cache_type = f"a KV cache of type {cache.cache_dtype}"
    quantized, version = cache.cache_dtype in kv_layout.FP8_DTYPES, versions.host_version()
    return [
        (cache.cache_dtype not in (*kv_layout.PLAIN_DTYPES, *kv_layout.FP8_DTYPES), cache_type),
        (quantized and device.accelerator, cache_type),
        (quantized and version not in versions.TESTED_HOSTS, f"{cache_type} with vLLM {version}"),
        (quantized and model is not None and model.use_mla, f"{cache_type} for latent attention"),
        (quantized and bool(cache.kv_cache_dtype_skip_layers), f"{cache_type} for some layers only"),
        (quantized and _has_states(model), f"{cache_type} for {STATES}"),
    ]


def _draft_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method not in model_runner.DRAFTS:
        return []
    runner = model_runner.choice(vllm_config)
    draft, models_of = speculation.draft_model_config, (vllm_config.model_config, speculation.draft_model_config)
    return [
        (device.accelerator, "drafts of a model"),
        (runner.runner == "V1", f"drafts of a model by the V1 model runner ({runner.why})"),
        (any(one.quantization is not None for one in models_of), "drafts of a model with quantized weights"),
        *((lacking, f"a draft with {named}") for lacking, named in _model_features(draft, device)),
    ]


def _has_states(model: ModelConfig | None) -> bool:
    """Whether some layers keep a state for each request in place of its keys and values."""
    return model is not None and bool(model.is_hybrid or model.is_attention_free)


def _serves_states(model: ModelConfig, device: DeviceSpec) -> bool:
    """Whether those layers are ours, and vLLM takes forms of the kernels that move their states."""
    tested = versions.host_version() in versions.TESTED_HOSTS and model_runner.takes_forms()
    return tested and model.architecture in DELTA_NETS and not device.accelerator


def _has_experts(vllm_config: VllmConfig) -> bool:
    return vllm_config.model_config is not None and vllm_config.model_config.is_moe


def _model_features(model: ModelConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    return [
        (model.is_encoder_decoder and device.accelerator, "encoder-decoder models"),
        *_quantization_features(model),
        (_has_states(model) and not _serves_states(model, device), "state-space and linear-attention layers"),
        (hasattr(model.hf_text_config, "index_topk"), "sparse latent attention"),
        (
            models.is_unbalanced(model),
            f"{model.architecture} in float16 (vLLM itself scales the shared experts wrongly there)",
        ),
    ]


def _quantization_features(model: ModelConfig) -> list[tuple[bool, str]]:
    from vllm.platforms import current_platform

    if model.quantization is None or not current_platform.is_out_of_tree():  # vLLM's own platform has its own kernels
        return []
    name = quantization.SERVED[model.quantization]
    return [
        (model.use_mla, f"latent attention quantized by '{name}'"),
        (model.is_moe, f"experts quantized by '{name}'"),
        (_has_states(model), f"{STATES} quantized by '{name}'"),
        (model.model_arch_config.quantization_config is None, f"'{name}' for a checkpoint that is not quantized"),
    ]


def _refuse_native_layers(model: ModelConfig) -> None:
    settings = get_settings()
    needed = [("experts", one) for one in EXPERT_LAYERS.items() if model.is_moe]
    needed += [("linear attention", one) for one in STATE_LAYERS.items() if _has_states(model)]
    for what, (name, operators) in needed:
        if not any(settings.registers(name, operator) for operator in operators):
            raise ValueError(
                f"model {model.model} has {what}, and vLLM has no code for that on an out-of-tree platform, "
                f"but a list or a switch leaves out {name} ({', '.join(operators)})"
            )


def cache_space() -> int | None:
    """Bytes that ``VLLM_CPU_KVCACHE_SPACE`` asks for, or ``None``.

    Raises:
        ConfigError: it is no positive number of GiB.
    """
    text = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    try:
        size = int(float(text) * (1 << 30)) if text else None
    except (ValueError, OverflowError):
        size = -1
    if size is not None and size < 0:
        raise ConfigError(
            "environment variable VLLM_CPU_KVCACHE_SPACE", None, f"a number of GiB is needed, not {text!r}"
        )
    return size or None


def _check_attention_class(path: str) -> None:
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


def attention_backend_path(use_mla: bool) -> str:
    """The attention class that the operator ``attention_backend`` selects.

    Raises:
        ValueError: no implementation has one for this kind of attention.
    """
    try:
        path: str = call_op("attention_backend", use_mla)
    except (NoImplementationError, NotImplementedError) as error:
        kind = "multi-head latent attention (MLA)" if use_mla else "attention"
        raise ValueError(f"no implementation of 'attention_backend' offers {kind}: {error}") from error
    return path


def attention_refusals(path: str, config: AttentionSelectorConfig, capability: DeviceCapability | None) -> list[str]:
    """Why an attention class cannot serve a layer, in its own words."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return attention_class.attention_refusals(resolve_obj_by_qualname(path), config, capability)


# -- changes ----------------------------------------------------------------------------------------------------------


def apply_defaults(vllm_config: VllmConfig, device: DeviceSpec) -> None:
    """Defaults where the user chose nothing: layers run our forward (``custom_ops``), models are compiled.

    They run eagerly where Inductor cannot build code, and graphs are captured only where somebody verified the device.
    Who asks for piecewise graphs gets the pieces too, which compilation makes.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    if not {"all", "none"} & set(compilation.custom_ops):
        compilation.custom_ops.append("all")
    if compilation.mode is None and device.inductor != TRITON:
        graphs = compilation.cudagraph_mode
        pieces = device.graphs and graphs is not None and graphs.requires_piecewise_compilation()
        compilation.mode = CompilationMode.VLLM_COMPILE if pieces else compile.default_mode(vllm_config, device)
    if compilation.cudagraph_mode is None and device.graphs and device.unverified(HOST.name):
        reason = f"nobody verified graphs on {device.name}; set it to capture them all the same"
        _set(compilation, "cudagraph_mode", CUDAGraphMode.NONE, reason)
    if compilation.cudagraph_mode is not None and not device.graphs:
        _set(compilation, "cudagraph_mode", CUDAGraphMode.NONE, f"{device.name} has no graphs to capture")


def adapt(vllm_config: VllmConfig, device: DeviceSpec, *, native: bool = False) -> None:
    """Set what the worker needs; with ``native`` vLLM treats the platform as its own."""
    parallel = vllm_config.parallel_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = device.workers.get(HOST.name, GPU_WORKER if device.accelerator else CPU_WORKER)
    if not native:
        reason = "it is a CUDA kernel"
        if HOST.name in device.native_platforms and parallel.tensor_parallel_size > 1:
            reason += "; VLLM_FL_NATIVE_PLATFORM=1 keeps it, which decodes faster with several GPUs (docs/gpu.md)"
        _set(parallel, "disable_custom_all_reduce", True, reason)
    if compile.is_compiled(vllm_config):
        compile.adapt(vllm_config.compilation_config, device)
    if not device.forks or torch.get_num_threads() > 1:  # a fork loses a device's context, and OpenMP's threads
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if "v2" not in device.model_runners:
        _keep_to_v1(vllm_config)
    if not is_packed(vllm_config):  # else a parent process has said it
        logger.info("model runner %s", model_runner.choice(vllm_config))
    if device.accelerator:
        _adapt_graphs(vllm_config)
    else:
        _adapt_to_host(vllm_config, device)


def _adapt_graphs(vllm_config: VllmConfig) -> None:
    """Keep what no graph can hold out of them: piecewise graphs end before attention, and begin again behind it."""
    from vllm.config import CUDAGraphMode

    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return
    latent = model is not None and model.use_mla
    attention = without_graphs(LATENT_OPERATORS if latent else ATTENTION_OPERATORS)
    # Gated delta nets are refused on accelerators, so their operators are in no graph.
    elsewhere = {*ATTENTION_OPERATORS, *LATENT_OPERATORS, *delta_net.OPERATORS}
    elsewhere |= set() if _has_experts(vllm_config) else set(EXPERT_OPERATORS)
    others = without_graphs(op for op in OPERATORS if op not in elsewhere)
    piecewise = compile.is_compiled(vllm_config) and compilation.splitting_ops != []
    if others or (attention and not piecewise):
        _set(compilation, "cudagraph_mode", CUDAGraphMode.NONE, _no_graph_holds(others or attention))
    elif attention and compilation.cudagraph_mode.has_full_cudagraphs():
        _set(compilation, "cudagraph_mode", CUDAGraphMode.PIECEWISE, _no_graph_holds(attention))


def _no_graph_holds(impls: Sequence[OpImpl]) -> str:
    return "no graph can hold " + ", ".join(f"'{impl.impl_id}' of '{impl.op_name}'" for impl in impls)


def _keep_to_v1(vllm_config: VllmConfig) -> None:
    if vllm_config.use_v2_model_runner:
        raise ValueError(
            "vllm_fl runs vLLM's V1 model runner, but something in this configuration forces the V2 runner"
        )


def _adapt_to_host(vllm_config: VllmConfig, device: DeviceSpec) -> None:
    """The device is the host itself: nothing is asynchronous there, and the workers share its cores."""
    _set(vllm_config.scheduler_config, "async_scheduling", False, f"{device.name} has no events to wait for")
    cores.share_out(workers_here(vllm_config), os.environ)
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, torch.get_num_threads() // workers_here(vllm_config))
        logger.info("OMP_NUM_THREADS: %d, because vLLM would otherwise leave one thread to the model", threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _set(config: Any, field: str, value: Any, reason: str) -> None:
    before = getattr(config, field)
    if before != value:
        logger.info("%s.%s: %s instead of %s, because %s", type(config).__name__, field, value, before, reason)
        setattr(config, field, value)


def workers_here(vllm_config: VllmConfig) -> int:
    """Workers that share this machine's memory and cores: its part of each data-parallel rank here, together.

    Engines of a dense model forget in their own processes that there are others, so a parent's count is passed on.
    """
    given = vllm_config.additional_config
    packed = given.get(startup.CONFIG_KEY, {}) if isinstance(given, dict) else {}
    workers = packed.get(WORKERS_KEY) if isinstance(packed, dict) else None
    if type(workers) is int and workers > 0:  # pack_settings refuses anything else
        return workers
    parallel = vllm_config.parallel_config
    return int(parallel.local_world_size * max(1, parallel.data_parallel_size_local))


# -- additions --------------------------------------------------------------------------------------------------------


def _check_packed(given: Any) -> None:
    """The value under our key came from a parent process, or from a user who must learn what may stand there."""
    where = f"additional_config.{startup.CONFIG_KEY}"
    if not isinstance(given, dict) or not set(given) <= {"settings", WORKERS_KEY}:
        raise ConfigError(where, None, f"may only hold 'settings' as their to_json() wrote them, not {given!r}")
    workers = given.get(WORKERS_KEY, 1)
    if type(workers) is not int or workers < 1:
        raise ConfigError(where, WORKERS_KEY, f"is a number of workers, not {workers!r}")
    try:
        if "settings" in given:
            Settings.from_json(given["settings"])
    except ConfigError as error:
        raise ConfigError(where, "settings", f"is not what to_json() wrote: {error}") from error


def is_packed(vllm_config: VllmConfig) -> bool:
    """Whether :func:`pack_settings` has been here, perhaps in a parent process."""
    given = vllm_config.additional_config
    return isinstance(given, dict) and WORKERS_KEY in given.get(startup.CONFIG_KEY, {})


def pack_settings(vllm_config: VllmConfig) -> None:
    """Put settings and policy where every child process finds them; what is there already stays.

    vLLM hashes this part of the configuration into the key of its compile cache, so a graph never outlives its policy.
    """
    existing = vllm_config.additional_config
    if not isinstance(existing, dict):
        raise ValueError("vllm_fl carries its settings in additional_config, which must be a dictionary")
    given = existing.get(startup.CONFIG_KEY, {})
    _check_packed(given)
    packed = {**handover.pack(), WORKERS_KEY: workers_here(vllm_config), **given}
    vllm_config.additional_config = {**existing, startup.CONFIG_KEY: packed}  # a copy: the user's own stays as it is
