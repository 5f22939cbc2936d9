"""All places where SGLang is hooked or extended at run time; this top module of the package imports every hook.

Only this module replaces SGLang's attributes; in addition :func:`.speculation.kernel_hooks.prepare` adds kernels if
SGLang has none. :func:`all_hooks` lists the hooks with their reasons; :func:`~sglang_fl.compat.hooks.refuse_unhooked`
refuses to serve if SGLang did not apply one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from fl_dispatch.hosting.facts import untested

from .compat import hooks, native_kernels
from .compat.hooks import Hook, Kind
from .compat.runtime import ATTENTION
from .host import FUSED_OP, HOST, hooked
from .version import SMOKE_TESTED_HOSTS, TESTED_HOSTS, host_version

RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
LOADER = "sglang.srt.model_loader.loader:DefaultModelLoader"
OLDER_OP = "sglang.srt.layers.utils.multi_platform:MultiPlatformOp"
ADAPTERS = "sglang.srt.lora.lora_manager:LoRAManager"
PROMPT_GRAPHS = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner"
BATCH = "sglang.srt.model_executor.forward_batch_info:ForwardBatch"
DUAL_PRODUCT = "sglang.srt.layers.dual_gemm:DualGemm"
NORMS = "sglang.kernels.ops.layernorm.norm"
QWEN_ATTENTION = "sglang.srt.models.qwen3_5:Qwen3_5AttentionDecoderLayer"
DRAFT_NORMS = "sglang.kernels.ops.layernorm.fused_eh_norm"
LATENT_ATTENTION = "sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA"
POOL_SIZES = "sglang.srt.model_executor.pool_configurator:DefaultPoolConfigurator"
LATENT = "sglang.srt.models.deepseek_common.deepseek_weight_loader:DeepseekV2WeightLoaderMixin"
PREDICTOR = "sglang.srt.models.deepseek_nextn:DeepseekV3ForCausalLMNextN"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
DELTA = "sglang.kernels.ops.attention.triton_gdn_fused_proj"
SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
ELEMENTWISE = "sglang.kernels.ops.elementwise.elementwise"
OVERRIDES = "sglang.srt.arg_groups.overrides"
GROUP = "sglang.srt.distributed.parallel_state:GroupCoordinator"
PIPELINE = "sglang.srt.managers.scheduler_pp_mixin:SchedulerPPMixin"
SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"


@cache
def warn_of_untested_host() -> None:
    """Log one WARNING for an SGLang version that tests did not run on, with the missing names that we rely on."""
    untested.warn_if_untested(HOST, host_version(), TESTED_HOSTS, smoke_tested=SMOKE_TESTED_HOSTS)


def _unpadded(model_config: Any, load_config: Any, tp_size: int) -> Any:
    return model_config


def dispatch_target() -> str:
    """Return the function that this version's layers call to choose their forward."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.layernorm import RMSNorm

    fused = issubclass(RMSNorm, BaseFusedOp)
    return f"{FUSED_OP}._resolve_forward_method" if fused else f"{OLDER_OP}.dispatch_forward"


@cache
def _reasons() -> dict[str, str]:
    return {f"{fact.owner}.{name}": fact.why for fact in hooked() for name in fact.plain_names}


def _hook(target: str, call: Any, kind: Kind) -> Hook:
    """Return a hook with the reason from the facts; ``target`` is ``module:Class.name`` or ``module.name``."""
    return Hook(target.replace(":", "."), call, kind, _reasons()[target])


@cache
def all_hooks() -> tuple[Hook, ...]:
    """Return the hooks of this package with targets that the installed SGLang should have."""
    version = host_version()
    targets = {f"{fact.owner}.{name}" for fact in hooked() if fact.concerns(version) for name in fact.plain_names}
    present = {target.replace(":", ".") for target in targets}
    return tuple(hook for hook in _hooks() if hook.target in present)


def _hooks() -> tuple[Hook, ...]:
    """Return all hooks, for every supported version."""
    from . import checkpoint
    from .compat import backend_choice
    from .layers import classes, lora
    from .ranks import communicator, data_parallel
    from .worker import metrics, runner

    return (
        _hook(dispatch_target(), classes.resolve, "around"),
        _hook("sglang.kernels.fused_op.set_fused_op_backend", backend_choice.force, "around"),
        _hook(f"{RUNNER}.load_model", runner.load_model, "around"),
        _hook(f"{RUNNER}.forward", runner.forward, "around"),
        _hook(f"{LOADER}.load_weights_only", checkpoint.load_weights_only, "around"),
        _hook(f"{LOADER}._prepare_weights", checkpoint.note_files, "around"),
        _hook(f"{RUNNER}.init_lora_manager", lora.init_lora_manager, "around"),
        _hook(f"{ADAPTERS}.validate_new_adapter", lora.validate_new_adapter, "around"),
        _hook("sglang.srt.utils.common.support_triton", native_kernels.supports_triton, "around"),
        _hook("sglang.srt.utils.common.add_prometheus_middleware", metrics.join_metrics, "after"),
        _hook("sglang.srt.mem_cache.allocation.get_last_loc", native_kernels.last_locations, "around"),
        _hook("sglang.srt.layers.logits_processor.fused_softcap", native_kernels.cap_logits, "around"),
        _hook("sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp", _unpadded, "replace"),
        _hook("sglang.srt.models.utils.enable_fused_set_kv_buffer", native_kernels.rotate_and_write, "around"),
        _hook(f"{DUAL_PRODUCT}._select_mode", native_kernels.multiply_and_activate, "around"),
        _hook(f"{NORMS}.can_use_fused_inplace_qknorm", native_kernels.norm_queries_and_keys, "around"),
        _hook(f"{BATCH}.prepare_mlp_sync_batch", data_parallel.prepare_mlp_sync_batch, "around"),
        _hook("sglang.srt.layers.dp_attention.memcpy", data_parallel.memcpy, "around"),
        *(_hook(f"{GROUP}.{name}", call, kind) for name, call, kind in communicator.HOOKED),
        *(_hooks_of_tested_hosts() if host_version() in TESTED_HOSTS else ()),
    )


def _hooks_of_tested_hosts() -> Iterator[Hook]:
    """Yield hooks of features for tested versions only, because other versions may have renamed the targets."""
    from .attention import indexer
    from .compat import state_forms
    from .graphs import prompts
    from .layers import rotations
    from .quantization import check_experts, latent, updates
    from .quantization.cache import keep_own_name, load_scales
    from .speculation import kernel_hooks as speculative
    from .speculation import several_steps
    from .worker import damage

    yield _hook(f"{PROMPT_GRAPHS}.capture", prompts.capture, "around")
    yield _hook(f"{PROMPT_GRAPHS}.can_run_graph", prompts.can_run_graph, "around")
    yield _hook(f"{PROMPT_GRAPHS}.execute", prompts.execute, "around")
    yield _hook(f"{SCHEDULER}.init_req_max_new_tokens", rotations.choose, "around")
    yield _hook(f"{SCHEDULER}.init_req_max_new_tokens", several_steps.leave_room, "around")
    yield _hook(f"{RUNNER}.sample", damage.sample, "around")
    yield _hook("sglang.srt.speculative.eagle_utils.eagle_sample", damage.eagle_sample, "around")
    yield _hook(f"{SCHEDULER}.get_next_batch_to_run", damage.get_next_batch_to_run, "around")
    yield _hook(f"{SCHEDULER}.run_batch", damage.run_batch, "around")
    yield _hook(f"{SCHEDULER}.update_running_batch", several_steps.update_running_batch, "around")
    yield _hook(f"{PIPELINE}._pp_prepare_tensor_dict", damage.to_other_stages, "around")
    yield _hook(f"{PIPELINE}._pp_prep_batch_result", damage.from_last_stage, "around")
    yield _hook(f"{SCHEDULER}.process_batch_result", damage.process_batch_result, "around")
    yield _hook("sglang.srt.configs.model_config.is_deepseek_dsa", indexer.is_hosts_own, "around")
    yield _hook(f"{LATENT_ATTENTION}.__init__", indexer.add, "after")
    yield _hook(f"{POOL_SIZES}._compute_cell_size", indexer.bytes_of_token, "around")
    yield _hook("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", rotations.without_scaling, "around")
    yield _hook(f"{LATENT}.post_load_weights", latent.split_plain, "around")
    yield _hook(f"{QWEN_ATTENTION}.forward_prepare_cuda_fused", native_kernels.prepare_attention, "around")
    yield _hook(f"{DRAFT_NORMS}.fused_eh_norm", native_kernels.norm_drafters_inputs, "around")
    yield _hook(f"{PREDICTOR}.get_hf_to_sglang_mapper", latent.names_of_predictor, "replace")
    yield _hook(f"{RUNNER}.check_quantized_moe_compatibility", check_experts, "around")
    yield _hook("sglang.srt.model_loader.weight_utils.maybe_remap_kv_scale_name", keep_own_name, "around")
    yield _hook(f"{LOADER}.load_weights_and_postprocess", load_scales, "around")
    yield _hook(f"{OVERRIDES}.supports_mamba_cache_extra_buffer", state_forms.remembers_within, "around")
    yield _hook(f"{SCATTER}.scatter_mamba_states_after_mtp_verify", state_forms.commit_states, "around")
    yield _hook(f"{DELTA}.fused_qkvzba_split_reshape_cat", state_forms.split_groups, "around")
    yield _hook(f"{DELTA}.fused_qkvzba_split_reshape_cat_contiguous", state_forms.split_parts, "around")
    yield _hook(f"{ELEMENTWISE}.fused_sigmoid_mul", state_forms.gate_attention, "around")
    yield _hook(f"{ELEMENTWISE}.fused_gate_sigmoid_mul", state_forms.gate_shared, "around")
    yield _hook(f"{ELEMENTWISE}.fused_gate_sigmoid_mul_add", state_forms.add_gated_shared, "around")
    for way in updates.ANSWERS:
        yield _hook(f"{UPDATER}.{way}", updates.refusing(way), "around")
    for target, call in speculative.HOOKED:
        yield _hook(target, call, "around")


def register() -> None:
    """Register all hooks, and extend SGLang's tables."""
    warn_of_untested_host()
    hooks.register(all_hooks())
    extend_host()


def extend_host() -> None:
    """Extend SGLang's own tables: our attention, methods for ``Engine.collective_rpc``, names of quantization."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    from . import quantization, report
    from .attention import attention_backend
    from .platform import model_rules

    register_attention_backend(ATTENTION)(attention_backend.create)
    AttentionBackendRegistry.register(ATTENTION, attention_backend.absorb_always)
    add_attention_backend_choices([ATTENTION])
    for method in report.SCHEDULER_METHODS:
        setattr(Scheduler, method.__name__, method)
    quantization.announce()
    if host_version() in TESTED_HOSTS:
        from .worker import several_steps

        model_rules.register()
        several_steps.register()
