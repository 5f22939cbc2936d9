"""The plugin's answers, changes and additions in vLLM's configuration, before a model loads.

A change is logged with its reason; refusals are in :mod:`.refusals`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fl_dispatch import ConfigError, NoImplementationError, OpImpl, call_op, get_policy
from fl_dispatch.devices import TRITON, DeviceSpec
from fl_dispatch.devices.triton import why_unserved
from fl_dispatch.hosting.quantized import experts as quantized_experts
from fl_dispatch.hosting.start import handover
from fl_dispatch.hosting.start.first_choices import without_graphs
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.ops import OPERATORS
from fl_dispatch.settings import Settings, get_settings

from .. import cores
from ..attention import attention_class, kv_layout
from ..compat import indexer, model_runner, models
from ..compilation import compile
from ..damage import choice as damage
from ..damage.scheduler import contain
from ..host import HOST
from ..layers import delta_net, mamba2, rotations, states
from ..several_steps import choice as several_steps
from . import startup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = get_logger(__name__)

CPU_WORKER = "vllm_fl.worker.cpu.CPUWorkerFL"
GPU_WORKER = "vllm_fl.worker.gpu.GPUWorkerFL"
WORKERS_KEY = "workers_here"
SIZES_KEY = "sizes_left"
"""The key that marks a configuration in which the user chose no graph sizes."""
ATTENTION_OPERATORS = ("kv_cache_write", "paged_attention")
LATENT_OPERATORS = ("kv_cache_write", "mla_decode", "mla_prefill")
SPARSE_OPERATORS = ("index_key_write", "index_topk", "mla_sparse")
"""Operators of sparse latent attention in addition to :data:`LATENT_OPERATORS`."""
SPARSE_CLASS = "vllm_fl.attention.sparse.SparseMLAFLBackend"
LATENT_CLASS = "vllm_fl.attention.mla.MLAFLBackend"
EXPERT_OPERATORS = ("topk_softmax", "topk_sigmoid", "grouped_topk", "moe_align_block_size", "fused_moe", "moe_sum")


# -- answers ----------------------------------------------------------------------------------------------------------


def has_experts(vllm_config: VllmConfig) -> bool:
    """Whether the model is a mixture of experts."""
    return vllm_config.model_config is not None and vllm_config.model_config.is_moe


def attention_backend_path(use_mla: bool, use_sparse: bool = False) -> str:
    """Return the attention class that ``attention_backend`` selects; ours has another one for sparse layers.

    Raises:
        ValueError: no implementation has a class for this kind of attention.
    """
    try:
        path: str = call_op("attention_backend", use_mla)
    except (NoImplementationError, NotImplementedError) as error:
        kind = "multi-head latent attention (MLA)" if use_mla else "attention"
        raise ValueError(f"no implementation of 'attention_backend' offers {kind}: {error}") from error
    return SPARSE_CLASS if use_sparse and path == LATENT_CLASS else path


def attention_refusals(path: str, config: AttentionSelectorConfig, capability: DeviceCapability | None) -> list[str]:
    """Return in the attention class's words why it cannot serve a layer."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return attention_class.attention_refusals(resolve_obj_by_qualname(path), config, capability)


# -- changes ----------------------------------------------------------------------------------------------------------


def apply_defaults(vllm_config: VllmConfig, device: DeviceSpec) -> None:
    """Set defaults if the user chose nothing: layers run our forward (``custom_ops``), models are compiled.

    Models run eagerly if Inductor cannot build code, and graphs are captured only on a verified device. A user who asks
    for piecewise graphs also gets compilation, which makes the pieces. A model with an encoder and a decoder runs
    eagerly on every device, and graphs can hold its decoding.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    if compilation.cudagraph_capture_sizes is None and compilation.max_cudagraph_capture_size is None:
        vars(vllm_config)[SIZES_KEY] = True  # until pack_settings, during which vLLM fills them in
    if not {"all", "none"} & set(compilation.custom_ops):
        compilation.custom_ops.append("all")
    model = vllm_config.model_config
    if compilation.mode is None and device.inductor == TRITON and model is not None and model.is_encoder_decoder:
        compilation.mode = CompilationMode.NONE
    if compilation.mode is None and device.inductor != TRITON:
        graphs = compilation.cudagraph_mode
        pieces = device.graphs and graphs is not None and graphs.requires_piecewise_compilation()
        compilation.mode = CompilationMode.VLLM_COMPILE if pieces else compile.default_mode(vllm_config, device)
    if compilation.cudagraph_mode is None and device.graphs and device.unverified(HOST.name):
        reason = f"graphs are unverified on {device.name}; set it to capture them all the same"
        _set(compilation, "cudagraph_mode", CUDAGraphMode.NONE, reason)
    if compilation.cudagraph_mode is not None and not device.graphs:
        _set(compilation, "cudagraph_mode", CUDAGraphMode.NONE, f"{device.name} has no graphs to capture")


def adapt(vllm_config: VllmConfig, device: DeviceSpec, *, native: bool = False) -> None:
    """Set the worker's settings; with ``native`` vLLM treats the platform as its own."""
    rotations.settle(vllm_config)
    parallel = vllm_config.parallel_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = device.workers.get(HOST.name, GPU_WORKER if device.accelerator else CPU_WORKER)
    if not native:
        reason = "it is a CUDA kernel"
        if HOST.name in device.native_platforms and parallel.tensor_parallel_size > 1:
            reason += (
                "; VLLM_FL_NATIVE_PLATFORM=1 keeps it, which may decode faster with several GPUs (docs/measured/gpu.md)"
            )
        _set(parallel, "disable_custom_all_reduce", True, reason)
    if models.has_indexer(vllm_config.model_config):
        indexer.split_graphs_at("vllm_fl::sparse_index")
    if compile.is_compiled(vllm_config):
        compile.adapt(vllm_config.compilation_config, device)
    if get_settings().fuse_rope_kvcache:
        compile.join_rotations(vllm_config, _is_own_attention())
    if device.accelerator and get_policy().batch_invariant:
        logger.warning("VLLM_BATCH_INVARIANT=1: of accelerators, engines were seen to keep to it on an H100 alone")
    if not device.forks or _fork_waits(device):  # a fork loses a device's context, and OpenMP's threads
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if "v2" not in device.model_runners:
        _keep_to_v1(vllm_config)
    if not is_packed(vllm_config):  # otherwise a parent process has logged it
        logger.info("model runner %s", model_runner.choice(vllm_config))
    if device.accelerator:
        _adapt_graphs(vllm_config, native)
    else:
        _adapt_to_host(vllm_config, device)
    if device.accelerator and why_unserved():
        _keep_states_in_place(vllm_config, device)
    several_steps.adapt(vllm_config)
    damage.adapt(vllm_config)
    contain()


def _is_own_attention() -> bool:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from ..attention.dense import AttentionFLImpl

    return issubclass(resolve_obj_by_qualname(attention_backend_path(False)).get_impl_cls(), AttentionFLImpl)


def _fork_waits(device: DeviceSpec) -> bool:
    """Whether a forked worker may wait for OpenMP's threads forever; since 0.33 vLLM ends libgomp's threads first."""
    from vllm.utils import system_utils

    # PyTorch's builds for NVIDIA GPUs have that library; another vendor's build may have another.
    ends_threads = HOST.name in device.native_platforms and hasattr(system_utils, "_release_libgomp_threads")
    return torch.get_num_threads() > 1 and not ends_threads


def _adapt_graphs(vllm_config: VllmConfig, native: bool = False) -> None:
    """Keep implementations that graphs cannot hold out of them: piecewise graphs exclude attention.

    vLLM finds out only after it has compiled the pieces, without graphs, that graphs hold our attention for some
    batches.
    """
    from vllm.config import CUDAGraphMode

    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return
    latent = model is not None and model.use_mla
    scales = kv_layout.QUANTIZED_DTYPES.get(vllm_config.cache_config.cache_dtype, ())
    sparse = SPARSE_OPERATORS if models.has_indexer(model) else ()
    attention = without_graphs((*LATENT_OPERATORS, *sparse) if latent else ATTENTION_OPERATORS, scales)
    # Quantized experts with a first choice outside graphs are refused; graphs never hold prompts of layers with a
    # state.
    elsewhere = {*quantized_experts.OPERATORS, *states.PROMPTS}
    elsewhere |= {*ATTENTION_OPERATORS, *LATENT_OPERATORS, *SPARSE_OPERATORS}
    elsewhere.add(compile.ROTATE_AND_WRITE)
    keeps_states = models.has_states(model)
    if not keeps_states:
        elsewhere |= {*delta_net.OPERATORS, *mamba2.OPERATORS}
    elsewhere |= set() if has_experts(vllm_config) else set(EXPERT_OPERATORS)
    others = without_graphs(op for op in OPERATORS if op not in elsewhere)
    piecewise = compile.is_compiled(vllm_config) and compilation.splitting_ops != []
    outside = _no_graph_holds(attention) if attention else ""
    if vllm_config.parallel_config.decode_context_parallel_size > 1 and not native:
        outside = "attention over a cache that ranks divide reads lengths on the host"
    if others or (outside and not piecewise):
        _set(compilation, "cudagraph_mode", CUDAGraphMode.NONE, _no_graph_holds(others) if others else outside)
    elif outside and compilation.cudagraph_mode.has_full_cudagraphs():
        _set(compilation, "cudagraph_mode", CUDAGraphMode.PIECEWISE, outside)
    elif (
        keeps_states
        and compilation.cudagraph_mode.has_full_cudagraphs()
        and model_runner.choice(vllm_config).runner == "V1"
    ):
        reason = (
            "the V1 runner replays a graph of decoding for new prompts of one token, which would have others' states"
        )
        _set(compilation, "cudagraph_mode", CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE, reason)
    elif compilation.cudagraph_mode == CUDAGraphMode.FULL and piecewise and not native:
        reason = "graphs hold attention only for batches with one number of new tokens for every request"
        _set(compilation, "cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE, reason)


def _keep_states_in_place(vllm_config: VllmConfig, device: DeviceSpec) -> None:
    """Disable prefix caching for models with states, because vLLM moves states by addresses, which forms cannot use."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if models.has_states(model) and cache.enable_prefix_caching:
        reason = f"vLLM's kernels that move states of requests (mamba_utils.py) do not run on {device.name}"
        _set(cache, "enable_prefix_caching", False, reason)
        cache.mamba_cache_mode, cache.mamba_block_size = "none", model.max_model_len


def _no_graph_holds(impls: Sequence[OpImpl]) -> str:
    return "no graph can hold " + ", ".join(f"'{impl.impl_id}' of '{impl.op_name}'" for impl in impls)


def _keep_to_v1(vllm_config: VllmConfig) -> None:
    if vllm_config.use_v2_model_runner:
        raise ValueError(
            "vllm_fl runs vLLM's V1 model runner, but something in this configuration forces the V2 runner"
        )


def _adapt_to_host(vllm_config: VllmConfig, device: DeviceSpec) -> None:
    """Adapt to main memory as the device: nothing is asynchronous there, and the workers share its cores."""
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
    """Return the number of workers that share this machine's memory and cores, over all data-parallel ranks here.

    An engine of a dense model does not know in its process of other engines, so the parent passes the count on.
    """
    workers = _packed(vllm_config).get(WORKERS_KEY)
    if type(workers) is int and workers > 0:  # pack_settings refuses other values
        return workers
    parallel = vllm_config.parallel_config
    return int(parallel.local_world_size * max(1, parallel.data_parallel_size_local))


# -- additions --------------------------------------------------------------------------------------------------------


def _check_packed(given: Any) -> None:
    """Check the value under our key: a parent process wrote it, or the user learns which values are valid."""
    where = f"additional_config.{startup.CONFIG_KEY}"
    if not isinstance(given, dict) or not set(given) <= {"settings", WORKERS_KEY, SIZES_KEY}:
        raise ConfigError(where, None, f"may only hold 'settings' as their to_json() wrote them, not {given!r}")
    workers = given.get(WORKERS_KEY, 1)
    if type(workers) is not int or workers < 1:
        raise ConfigError(where, WORKERS_KEY, f"is a number of workers, not {workers!r}")
    if given.get(SIZES_KEY, True) is not True:
        raise ConfigError(where, SIZES_KEY, f"is true or not there, not {given[SIZES_KEY]!r}")
    try:
        if "settings" in given:
            Settings.from_json(given["settings"])
    except ConfigError as error:
        raise ConfigError(where, "settings", f"is not what to_json() wrote: {error}") from error


def is_packed(vllm_config: VllmConfig) -> bool:
    """Whether :func:`pack_settings` was called, perhaps in a parent process."""
    return WORKERS_KEY in _packed(vllm_config)


def are_sizes_left(vllm_config: VllmConfig) -> bool:
    """Whether the user chose no graph sizes, as recorded by a parent process."""
    return _packed(vllm_config).get(SIZES_KEY) is True


def _packed(vllm_config: VllmConfig) -> Mapping[str, Any]:
    """Return the data of :func:`pack_settings`; empty for another value, which it refuses."""
    given = vllm_config.additional_config
    found = given.get(startup.CONFIG_KEY) if isinstance(given, dict) else None
    return found if isinstance(found, dict) else {}


def pack_settings(vllm_config: VllmConfig) -> None:
    """Store settings and policy for child processes in the configuration; keep existing ones.

    vLLM hashes this part of the configuration into its compile-cache key, so a graph never outlives its policy.
    """
    existing = vllm_config.additional_config
    if not isinstance(existing, dict):
        raise ValueError("vllm_fl carries its settings in additional_config, which must be a dictionary")
    given = existing.get(startup.CONFIG_KEY, {})
    _check_packed(given)
    left = {SIZES_KEY: True} if vars(vllm_config).pop(SIZES_KEY, False) else {}
    packed = {**handover.pack(), WORKERS_KEY: workers_here(vllm_config), **left, **given}
    vllm_config.additional_config = {**existing, startup.CONFIG_KEY: packed}  # a copy: the user's own stays as it is
