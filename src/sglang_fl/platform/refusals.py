"""Refusals: one sentence each that names a feature that cannot be served, before weights load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fl_dispatch import get_policy
from fl_dispatch.devices import DeviceSpec
from fl_dispatch.hosting.positions import rotary_tables
from fl_dispatch.hosting.quantized import remedies
from fl_dispatch.hosting.start.first_choices import without_kernels
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from .. import quantization, speculation
from ..attention import indexer
from ..bridge import STATES as STATE_LAYERS
from ..compat import state_forms
from ..compat.runtime import ATTENTION, hosts_own_attention
from ..host import HOST
from ..version import TESTED_HOSTS, host_version

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = get_logger(__name__)

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
"""SGLang's line that forbids a feature on a CPU, with its function and file."""
SHARED_STATES = "SGLang gives drafters no states of their own: _init_pools in mem_cache/kv_cache_configurator.py"
STATES_ONLY = (
    "without attention SGLang takes no state after drafts: build_attention_backends in "
    "model_runner_components/attention_backend_setup.py"
)
MINIMAX = "MiniMaxM2ForCausalLM"
MINIMAX_NORMS = "its norms of queries and keys are Triton kernels: rms_sumsq_serial in models/minimax_m2.py"
ONE_PREDICTOR = "SGLang asserts that there is one: _initialize_nextn_conf in deepseek_weight_loader.py"


def _features(args: ServerArgs, device: DeviceSpec) -> list[tuple[Any, str, str]]:
    """Return ``(present, feature, SGLang's line)``."""
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
    """Refuse features that only the resolved configuration shows, before weights load; SGLang asks us earlier.

    Raises:
        ValueError: for the first feature of the model that cannot be served.
    """
    model = runner.model_config
    asked = [
        *_states(runner, device),
        *_sparse(runner, device),
        *_quantized(runner, device),
        *_predictors(runner),
        *_norms(runner, device),
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


STATES: Mapping[str, str] = {
    "FalconH1Config": "MambaMixer2",
    "FalconMambaConfig": "MambaMixer1",
    "GraniteMoeHybridConfig": "MambaMixer2",
    "Lfm2Config": "Lfm2ShortConv",
    "Lfm2MoeConfig": "Lfm2MoeShortConv",
    "Mamba2Config": "MambaMixer2",
    "MambaConfig": "MambaMixer1",
    "NemotronHConfig": "MambaMixer2",
    "Qwen3NextConfig": "RadixLinearAttention",
    "Qwen3_5MoeTextConfig": "RadixLinearAttention",
    "Qwen3_5TextConfig": "RadixLinearAttention",
}
"""Served models with states: configuration → the class of their layers with a state.

A class derived from one of these configurations is another network, which was not tested.
"""
DRAFTED = ("GraniteMoeHybridConfig", "Lfm2Config", "Qwen3NextConfig", "Qwen3_5TextConfig")
"""Configurations of models that may verify drafts."""
WITHOUT_ATTENTION = ("FalconMambaConfig", "Mamba2Config", "MambaConfig")


def _states(runner: ModelRunner, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of models with layers that keep a state."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    found = mambaish_config(runner.model_config)
    if found is None:
        return []
    args = runner.server_args
    name, what = type(found).__name__, state_forms.STATES
    groups = getattr(found, "mamba_n_groups", getattr(found, "n_groups", 0))
    quantized = runner.model_config.quantization is not None
    why = f" ({STATES_ONLY})" if name in WITHOUT_ATTENTION else ""
    return [
        (name not in STATES, f"{what} of {name}"),
        (host_version() not in TESTED_HOSTS, f"{what} under SGLang {host_version()}"),
        (quantized and not device.is_foreign and HOST.name not in device.verified, f"quantized {what}"),
        (
            quantized and groups % args.tp_size != 0,
            f"quantized {what} with fewer groups than ranks (MambaMixer2 in layers/attention/mamba/mamba.py)",
        ),
        (
            args.speculative_algorithm == "STANDALONE",
            f"a separate draft model and {what}" + f" ({SHARED_STATES})" * runner.is_draft_worker,
        ),
        (
            args.speculative_algorithm is not None and name not in DRAFTED,
            f"drafts beside {what} of {name}{why}",
        ),
        (getattr(args, "enable_linear_replayssm_spec", False), f"--enable-linear-replayssm-spec with {what}"),
        (args.enable_dp_attention, f"data-parallel attention beside {what}"),
        (bool(lacking := _without_kernels(name, device)), f"{what} by references of {', '.join(lacking)}"),
    ]


def _without_kernels(config: str, device: DeviceSpec) -> list[str]:
    """Return the operators of a configuration's layers with a state that have no kernel, if these layers are ours."""
    row = next((row for row in STATE_LAYERS if row.name == STATES.get(config)), None)
    if row is None or not get_settings().registers(row.name, row.bridge.fl_operator):
        return []
    return without_kernels(row.bridge.fl_choices, device)


def _sparse(runner: ModelRunner, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of sparse latent attention."""
    config, args, sparse = runner.model_config.hf_config, runner.server_args, "sparse latent attention"
    if indexer.topk_of(runner.model_config.hf_text_config) is None:
        return []
    models = indexer.ON_FOREIGN if device.is_foreign else indexer.MODELS
    return [
        (config.architectures[0] not in models, f"{sparse} of {config.architectures[0]}"),
        (host_version() not in TESTED_HOSTS, f"{sparse} under SGLang {host_version()}"),
        (bool(hosts_own_attention()), f"{sparse} by SGLang's own attention"),
        (args.enable_dp_attention, f"data-parallel attention beside {sparse}"),
    ]


def _predictors(runner: ModelRunner) -> list[tuple[bool, str]]:
    """Return the unserved features of predictors."""
    config = runner.model_config.hf_config
    if not runner.is_draft_worker or not any(name.endswith("NextN") for name in config.architectures):
        return []
    count = getattr(config, "num_nextn_predict_layers", None) or 1
    return [(count > 1, f"drafts of {count} predictors ({ONE_PREDICTOR})")]


def _norms(runner: ModelRunner, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the models with norms that only SGLang's Triton kernels compute."""
    names = runner.model_config.hf_config.architectures or ()
    return [(MINIMAX in names and not device.accelerator, f"{MINIMAX} ({MINIMAX_NORMS})")]


def _quantized(runner: ModelRunner, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of quantized checkpoints."""
    model, version = runner.model_config, host_version()
    method = model.quantization
    if method is None:
        return []
    said = (getattr(model.hf_config, name, None) for name in ("quantization_config", "compression_config"))
    latent = bool(runner.use_mla_backend)
    unquantized = method in ("fp8", "compressed-tensors", "mxfp4", "mxfp8") and not any(said)
    other = method == "mxfp4" and model.hf_config.architectures[0] != quantization.GPT_OSS
    return [
        (unquantized, f"'{method}' for a checkpoint that is not quantized"),
        (other, f"quantization 'mxfp4' of another model than gpt-oss ({remedies.of_method(method)})"),
        (method not in quantization.SERVED, f"quantization '{method}' ({remedies.of_method(method)})"),
        (HOST.name not in device.quantized, f"quantization '{method}'"),
        (version not in TESTED_HOSTS, f"quantization '{method}' under SGLang {version}"),
        (latent and HOST.name not in device.quantized_latent, f"latent attention quantized by '{method}'"),
        (
            latent and model.hf_config.architectures[0] not in quantization.LATENT_MODELS,
            f"latent attention of {model.hf_config.architectures[0]} quantized by '{method}'",
        ),
    ]
