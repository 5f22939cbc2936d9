"""Names of vLLM that are no public interface, and that our classes override, read or set.

vLLM may move any of them. One that is overridden or set under a name that is gone has no effect, and no error tells: so
:func:`missing` looks at the running version. A private name that is not listed here fails a test.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class HostNames:
    """Names of one class or module of vLLM.

    Args:
        owner: ``module:Class``, or ``module`` for attributes that its functions give to objects.
        names: attributes of the class or of its instances.
        user: which of our modules relies on them, below ``vllm_fl``.
        versions: the host versions that have them, as vLLM's major.minor; empty for all.
    """

    owner: str
    names: tuple[str, ...]
    user: str
    versions: tuple[str, ...] = ()


_MOE = "vllm.model_executor.layers.fused_moe"
_MLA = "vllm.model_executor.layers.attention.mla_attention"
_ROPE = "vllm.model_executor.layers.rotary_embedding"
_WORKER = "vllm.v1.worker"
_SUPPORTS = ("current_device", "no_act_and_mul", "activation", "quant_scheme", "parallel_config", "batch_invariance")

NAMES = (
    HostNames(f"{_WORKER}.gpu_worker:Worker", ("_make_model_runner",), "worker_cpu", ("0.32", "0.33")),
    HostNames(f"{_WORKER}.gpu_worker:Worker", ("_init_workspace_and_model_runner",), "compat.runner", ("0.32", "0.33")),
    HostNames(f"{_WORKER}.gpu_worker:Worker", ("_maybe_get_memory_pool_context",), "worker"),
    HostNames(f"{_WORKER}.gpu_model_runner:GPUModelRunner", ("_dummy_run",), "worker_cpu"),
    HostNames(f"{_WORKER}.gpu.model_runner:GPUModelRunner", ("_dummy_run",), "worker_gpu"),
    HostNames(
        f"{_WORKER}.cpu_model_runner:CPUModelRunner",
        ("_get_prompt_logprobs_dict", "num_prompt_logprobs", "input_batch", "query_start_loc"),
        "lora",
    ),
    HostNames("vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase", ("token_lora_indices",), "lora"),
    HostNames("vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase", ("sampler_indices",), "lora"),
    HostNames(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        ("add_shrink", "add_lora_embedding", "add_lora_logits"),
        "lora",
    ),
    HostNames("vllm.model_executor.custom_op:CustomOp", ("_forward_method", "forward_native"), "forwards"),
    HostNames("vllm.model_executor.custom_op", ("op_registry_oot",), "layers"),
    HostNames("vllm.model_executor.layers.linear:UnquantizedLinearMethod", ("apply",), "linear"),
    HostNames(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
        ("_gemm_impl",),
        "compat.layer_classes",
        ("0.32", "0.33"),
    ),
    HostNames("vllm.model_executor.layers.utils", ("default_unquantized_gemm",), "compat.layer_classes"),
    HostNames(f"{_ROPE}.base:RotaryEmbedding", ("_match_cos_sin_cache_dtype",), "forwards"),
    HostNames(
        f"{_ROPE}.phi3_long_rope_scaled_rope:Phi3LongRoPEScaledRotaryEmbedding",
        ("use_long_rope", "original_max_position_embeddings", "long_short_cos_sin_cache"),
        "forwards",
    ),
    HostNames("vllm.model_executor.layers.activation:XIELU", ("_beta_scalar", "_eps_scalar"), "forwards"),
    HostNames(
        f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        ("_init_moe_kernel", "unquantized_backend", "experts_cls", "moe_kernel"),
        "moe",
        ("0.32", "0.33"),
    ),
    HostNames(
        f"{_MOE}.modular_kernel:FusedMoEExpertsModular",
        (*(f"_supports_{what}" for what in _SUPPORTS), "w1_bias", "w2_bias", "finalize_weight_and_reduce_impl"),
        "moe",
        ("0.32", "0.33"),
    ),
    HostNames(f"{_MOE}.router.base_router:BaseRouter", ("_compute_routing", "capture_fn", "eplb_state"), "moe"),
    HostNames(
        f"{_MOE}.router.fused_topk_bias_router:FusedTopKBiasRouter",
        ("_hash_indices_table", "bias_vl", "num_fused_shared_experts", "routed_scaling_factor"),
        "moe",
        ("0.32", "0.33"),
    ),
    HostNames("vllm.v1.attention.backend:AttentionMetadataBuilder", ("_cudagraph_support",), "attention"),
    HostNames(f"{_MLA}:MLACommonMetadataBuilder", ("_build_decode",), "mla_metadata"),
    HostNames(
        f"{_MLA}:MLACommonImpl",
        ("_concat_k_nope_k_pe", "_use_flashinfer_concat_mla_k", "supports_quant_query_input"),
        "mla",
    ),
    HostNames("vllm.v1.attention.backends.mla.prefill.base:MLAPrefillBackend", ("_prefill_metadata",), "mla_prefill"),
    HostNames(
        "vllm.compilation.passes.pass_manager:PostGradPassManager", ("configure", "fix_functionalization"), "passes"
    ),
    HostNames("vllm.compilation.decorators", ("do_not_compile",), "compile"),
    HostNames(
        "vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase",
        ("use_all2all", "all2all_manager", "rank_in_group", "unique_name"),
        "distributed",
    ),
)


def missing(version: str) -> list[str]:
    """The names that this vLLM, whose version is given as major.minor, does not have, in words."""
    return [
        f"{row.owner} has no {name} in vLLM {version}, which vllm_fl.{row.user} relies on"
        for row in NAMES
        if not row.versions or version in row.versions
        for name in row.names
        if not _has(_find(row.owner), name)
    ]


def _find(owner: str) -> Any:
    """A class or a module, or ``None``."""
    module, _, name = owner.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    return getattr(found, name, None) if name else found


def _has(owner: Any, name: str) -> bool:
    """Whether a class, one of its instances, or an object of a module's functions has an attribute."""
    if owner is None or hasattr(owner, name):
        return owner is not None
    parts = [owner] if isinstance(owner, ModuleType) else [base for base in owner.__mro__ if base is not object]
    return any(name in _assigned(part) for part in parts)


@cache
def _assigned(part: Any) -> frozenset[str]:
    """The attributes that the code of a class or module gives to an object."""
    try:
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(part)))
    except (OSError, TypeError):
        return frozenset()  # no Python source
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Call(func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=str(name)), *_]):
                found.add(name)
    return frozenset(found)
