"""Refusals and defaults of the plugin in SGLang's server arguments, before a process starts.

A refusal is one sentence that names the feature; a changed value is logged with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fl_dispatch import get_policy
from fl_dispatch.devices import DeviceSpec, device_specs
from fl_dispatch.hosting.memory import kv_layout
from fl_dispatch.hosting.positions import rotary_tables
from fl_dispatch.hosting.quantized import remedies
from fl_dispatch.hosting.start import handover
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from .. import quantization, speculation
from ..host import HOST
from ..layers import lora
from ..version import TESTED_HOSTS, host_version

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = get_logger(__name__)

ATTENTION = "fl"
"""The name of our attention backend in SGLang's lists."""

PLAIN_CACHE_DTYPES = ("auto", "float32", "bfloat16", "bf16", "float16")


BY_HOST: Mapping[str, str] = {
    "deterministic": (
        "puts Triton kernels in the place of PyTorch's products (enable_batch_invariant_mode in "
        "batch_invariant_ops/batch_invariant_ops.py), and takes attention by names of its own"
    ),
    "levels": (
        "copies between them by kernels for its own devices (load_to_device_per_layer in mem_cache/pool_host/mha.py)"
    ),
    "offload": "brings them back to 'cuda' (create_device_tensor in utils/offloader.py)",
    "pdmux": "divides the processors of an NVIDIA GPU (initialize_stream_groups in multiplex/pdmux_context.py)",
    "saver": "gives memory back by a library for GPUs (create in utils/torch_memory_saver_adapter.py)",
}
"""The line of SGLang's that forbids something on a CPU, with its function and file."""


def _features(args: ServerArgs, device: DeviceSpec) -> list[tuple[Any, str, str]]:
    """``(present, feature, line of SGLang's)``."""
    asked, cache = args.quantization, f"a KV cache of type {args.kv_cache_dtype}"
    plain, fp8 = args.kv_cache_dtype in PLAIN_CACHE_DTYPES, args.kv_cache_dtype == quantization.FP8_CACHE
    kernels = HOST.name in device.host_kernels
    version, attention_groups = host_version(), args.enable_dp_attention or getattr(args, "attn_dp_size", 1) > 1
    levels = args.enable_hierarchical_cache or args.enable_lmcache or args.enable_hisparse
    because = BY_HOST if not device.accelerator else dict.fromkeys(BY_HOST, "")
    ours = [
        (get_policy().batch_invariant, "VLLM_BATCH_INVARIANT=1"),
        (asked and asked not in quantization.SERVED, f"quantization '{asked}'"),
        (not plain and not (fp8 and device.float8), cache),
        (fp8 and version not in TESTED_HOSTS, f"{cache} under SGLang {version}"),
        (args.quantization_param_path, "scales of a KV cache in a file of their own"),
        *speculation.unserved(args, device, kernels),
        (args.enable_torch_compile, "--enable-torch-compile"),
        ((args.enable_lora or args.lora_paths) and device.accelerator and not kernels, "LoRA"),
        (args.disaggregation_mode != "null", "disaggregated prefill and decode"),
        (attention_groups and device.accelerator, "data-parallel attention"),
        (attention_groups and version not in TESTED_HOSTS, f"data-parallel attention under SGLang {version}"),
        (args.dcp_size > 1 or args.attn_cp_size > 1, "context parallelism"),
        (args.enable_two_batch_overlap or args.enable_single_batch_overlap, "overlapping batches"),
        (_interleaves_experts(), "experts' weights in the order of SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"),
        (getattr(args, "enable_fused_qk_norm_rope", False), "--enable-fused-qk-norm-rope"),
    ]
    hosts = [
        (args.enable_deterministic_inference, "--enable-deterministic-inference", "deterministic"),
        (levels, "a cache of several levels", "levels"),
        (args.enable_pdmux, "--enable-pdmux", "pdmux"),
        (args.cpu_offload_gb > 0 or args.offload_group_size > 0, "weights that are kept elsewhere", "offload"),
        (args.enable_memory_saver and not device.accelerator, "--enable-memory-saver", "saver"),
    ]
    return [*((*pair, "") for pair in ours), *((on, what, because[line]) for on, what, line in hosts)]


def _interleaves_experts() -> bool:
    from sglang.srt.environ import envs

    asked = getattr(envs, "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", None)
    return asked is not None and bool(asked.get())


def refuse_unsupported(args: ServerArgs, device: DeviceSpec) -> None:
    """Raise ``ValueError`` for the first feature that cannot be served."""
    for present, feature, line in _features(args, device):
        if present:
            because = f", because SGLang {line}" if line else ""
            said = f"sglang_fl does not support {feature} on {device.name} yet (model {args.model_path}){because}"
            raise ValueError(said)


def check_model(runner: ModelRunner, device: DeviceSpec) -> None:
    """Refuse, before weights load, what only the resolved configuration says, because SGLang asks us before.

    Raises:
        ValueError: for the first feature of the model that cannot be served.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    model = runner.model_config
    predicts = runner.is_draft_worker and any(name.endswith("NextN") for name in model.hf_config.architectures)
    asked = [
        *_quantized(runner, device),
        (predicts and device.accelerator, "drafts of a predictor (SGLang computes its norms in one kernel)"),
        (mambaish_config(model) is not None, "state-space and linear-attention layers"),
        (
            getattr(model, "v_head_dim", None) not in (None, model.head_dim) and not runner.use_mla_backend,
            "values of another size than keys",
        ),
    ]
    for present, feature in asked:
        if present:
            raise ValueError(f"sglang_fl does not support {feature} on {device.name} yet (model {model.model_path})")
    longest = rotary_tables.limit(model.hf_text_config)
    if longest is not None and model.context_len > longest:
        raise ValueError(rotary_tables.too_long(model.context_len, longest, f"give --context-length {longest}"))
    for backend in hosts_own_attention():
        if not device.accelerator and backend != "torch_native":
            raise ValueError(
                f"the attention backend '{backend}' cannot run on {device.name} (model {model.model_path})"
            )
        logger.warning(
            "the attention backend is '%s': SGLang's own code runs, not the operators kv_cache_write and "
            "paged_attention; leave it unset, or give '%s'",
            backend,
            ATTENTION,
        )


def _quantized(runner: ModelRunner, device: DeviceSpec) -> list[tuple[bool, str]]:
    model, version = runner.model_config, host_version()
    method = model.quantization
    if method is None:
        return []
    said = (getattr(model.hf_config, name, None) for name in ("quantization_config", "compression_config"))
    latent = bool(runner.use_mla_backend)
    unquantized = method in ("fp8", "compressed-tensors") and not any(said)
    return [
        (unquantized, f"'{method}' for a checkpoint that is not quantized"),
        (method not in quantization.SERVED, f"quantization '{method}' ({remedies.of_method(method)})"),
        (HOST.name not in device.quantized, f"quantization '{method}'"),
        (version not in TESTED_HOSTS, f"quantization '{method}' under SGLang {version}"),
        (latent and HOST.name not in device.quantized_latent, f"latent attention quantized by '{method}'"),
        (
            latent and model.hf_config.architectures[0] not in quantization.LATENT_MODELS,
            f"latent attention of {model.hf_config.architectures[0]} quantized by '{method}'",
        ),
    ]


def hosts_own_attention() -> list[str]:
    """The attention backends in force that are SGLang's own."""
    from sglang.srt.runtime_context import attention_backends

    return sorted({*attention_backends()} - {ATTENTION})


def largest_step() -> int:
    """Tokens of the largest step, in a scheduler process."""
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size or -1  # -1: prompts are not divided
    return int(chunk if chunk > 0 else schedule.max_prefill_tokens)


def apply_defaults(args: ServerArgs, device: DeviceSpec) -> None:
    """Set defaults for this device, where the user chose nothing."""
    multiple = kv_layout.wish().multiple
    defaults = {
        "device": device.torch_type,
        **({"page_size": multiple} if multiple > 1 else {}),
        "attention_backend": ATTENTION,
        **({} if HOST.name in device.host_kernels else {"sampling_backend": "pytorch"}),
    }
    if args.prefill_attention_backend is not None and args.decode_attention_backend is not None:
        del defaults["attention_backend"]
    for field, value in defaults.items():
        if getattr(args, field) is None:
            setattr(args, field, value)
    for spec in device_specs():
        if spec.torch_type == device.torch_type and HOST.name in spec.host_attention:
            _take_back_attention(args, spec.host_attention[HOST.name])
    _adapt_graphs(args, device)
    speculation.apply_defaults(args, _set)
    _set(args, "disable_custom_all_reduce", True, "it is a CUDA kernel")
    if HOST.name in device.host_kernels and args.tp_size > 1 and get_settings().registers("RMSNorm", "rms_norm"):
        _set(args, "enforce_disable_flashinfer_allreduce_fusion", True, "it computes norms in the place of operators")
    _set(args, "disable_hybrid_swa_memory", True, "sglang_fl keeps one pool for layers with and without a window")
    if not device.accelerator:
        if args.enable_lora or args.lora_paths:
            _set(args, "lora_backend", lora.BACKEND, "the others are Triton kernels")
        _cpu_defaults(args)


def _take_back_attention(args: ServerArgs, host: str) -> None:
    """Our attention in the place of the backend that SGLang set for the device, before it asked us.

    For an NPU its ``set_default_server_args`` does, for a CPU its ``handle_cpu_backends``.
    """
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if getattr(args, field) == host:
            _set(args, field, ATTENTION, f"'{host}' is SGLang's own code for this device, not operators")


def _adapt_graphs(args: ServerArgs, device: DeviceSpec) -> None:
    """The graphs that SGLang's own runners capture of our operators, and no others.

    SGLang has read its flags about graphs when it asks us, and reads this.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    graphs = args.cuda_graph_config
    for phase in Phase.ALL:
        before = graphs[phase].backend
        wanted, reason = _graphs_of(phase, args, device)
        if before not in (wanted, Backend.DISABLED):
            logger.info("graphs of %s: '%s' instead of '%s', because %s", phase, wanted, before, reason)
            graphs = with_phase(graphs, phase, backend=wanted)
    args.cuda_graph_config = graphs


def _graphs_of(phase: str, args: ServerArgs, device: DeviceSpec) -> tuple[str, str]:
    """The kind of graphs that is captured of a phase, and why it is no other."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase

    for absent, reason in (
        (not device.graphs, f"{device.name} has no graphs to capture"),
        (HOST.name not in device.host_kernels, "sglang_fl captures none yet"),
        (args.speculative_algorithm is not None, "sglang_fl makes and checks drafts eagerly"),
    ):
        if absent:
            return Backend.DISABLED, reason
    if phase == Phase.DECODE:
        return Backend.FULL, "sglang_fl captures decoding as a whole"
    version = host_version()
    for absent, reason in (
        (version not in TESTED_HOSTS, f"sglang_fl does not know those of SGLang {version}"),
        (args.enable_lora or args.lora_paths, "sglang_fl reads prompts for adapters eagerly"),
        (args.pp_size > 1, "sglang_fl reads prompts eagerly in stages of a pipeline"),
        (args.tp_size > 1, "sglang_fl reads prompts eagerly on several ranks"),
    ):
        if absent:
            return Backend.DISABLED, reason
    return Backend.BREAKABLE, "sglang_fl leaves attention of prompts out of graphs"


def _cpu_defaults(args: ServerArgs) -> None:
    """SGLang binds the threads of several ranks to cores by a variable that it demands."""
    ranks, cores = args.tp_size * args.pp_size * args.dp_size, sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    parts = [cores[(rank * share) % len(cores) :][:share] for rank in range(ranks)]
    binding = "|".join(",".join(map(str, part)) for part in parts)
    _set_variable("SGLANG_CPU_OMP_THREADS_BIND", binding if ranks > 1 else None)
    _set_variable("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // ranks)))


_variables: dict[str, str] = {}
"""Variables that :func:`_set_variable` has set, for the engine that this process started before: they are no user's."""


def _set_variable(name: str, value: str | None) -> None:
    """Set an environment variable that the user has not set; ``None`` removes the value of an earlier engine."""
    if name in os.environ and os.environ[name] != _variables.get(name):
        return
    _variables.pop(name, None)
    os.environ.pop(name, None)
    if value is not None:
        logger.info("%s: %s, for the ranks of this engine", name, value)
        os.environ[name] = _variables[name] = value


def _set(args: ServerArgs, field: str, value: Any, reason: str) -> None:
    before = getattr(args, field)
    if before != value:
        logger.info("%s: %s instead of %s, because %s", field, value, before, reason)
        setattr(args, field, value)


def hand_over() -> None:
    """Leave settings and policy for the processes that SGLang starts next."""
    handover.offer()
