"""The table of the host attributes that are replaced or filled in, and its check against the host's version.

Each is a row of :data:`REPLACEMENTS` with its reason and the host versions it is for; :func:`check_targets` finds the
rows whose target has moved.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Replacement:
    """One host attribute that is replaced or filled in.

    Args:
        target: ``module:attribute``; the attribute may be dotted.
        reason: what goes wrong without it.
        versions: the host versions that need it, as vLLM's major.minor; empty for all.
    """

    target: str
    reason: str
    versions: tuple[str, ...] = ()


SLOT_MAPPING_KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
ROTARY_PACKAGE = "vllm.model_executor.layers.rotary_embedding"
MLA = "vllm.model_executor.layers.attention.mla_attention"
BUFFERS = "vllm.v1.worker.gpu.buffer_utils"
REJECTION_SAMPLER = "vllm.v1.sample.rejection_sampler"
REJECTION_KERNELS = (
    "rejection_greedy_sample_kernel",
    "rejection_random_sample_kernel",
    "expand_kernel",
    "sample_recovered_tokens_kernel",
)

REPLACEMENTS = (
    Replacement(
        "vllm.envs:environment_variables",
        "vLLM warns about unknown VLLM_* variables, or refuses them with --fail-on-environ-validation; ours are added.",
    ),
    Replacement(
        "torch.accelerator:empty_cache",
        "vLLM calls it at shutdown unless the platform is its own CPU platform; without an accelerator it raises.",
    ),
    Replacement("torch.accelerator:empty_host_cache", "vLLM calls it at shutdown; without an accelerator it raises."),
    Replacement(
        "torch.accelerator:synchronize",
        "vLLM calls it at shutdown and between steps; without an accelerator it raises.",
    ),
    Replacement(
        "vllm.v1.worker.block_table:ComputeSlotMappingKernel.kernel",
        "A Triton kernel; there is no Triton driver on a CPU. Replaced through vLLM's own register_kernels.",
        ("0.32", "0.33"),
    ),
    Replacement(
        "vllm.v1.worker.block_table:_compute_slot_mapping_kernel",
        "A Triton kernel; there is no Triton driver on a CPU, and this version has no register_kernels.",
        ("0.26",),
    ),
    Replacement(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner._postprocess_triton",
        "It would put kernels of vLLM's compiled library in the places of the Triton kernels.",
        ("0.26",),
    ),
    Replacement(
        f"{MLA}:build_mla_chunked_context_metadata",
        "It pins memory; without an accelerator that raises.",
        ("0.26",),
    ),
    Replacement(
        "vllm.v1.attention.backends.mla.prefill.registry:_MLA_PREFILL_OVERRIDES",
        "No platform is asked for the prefill of latent attention, and vLLM's needs compiled kernels. Filled through "
        "vLLM's own register_mla_prefill_backend.",
        ("0.26",),
    ),
    Replacement(
        f"{BUFFERS}:get_accelerator_view_from_cpu_tensor",
        "The V2 model runner's buffers in host memory need it; on an out-of-tree platform it raises, and elsewhere it "
        "is a compiled operator.",
    ),
    Replacement(
        "vllm.utils.torch_utils:weak_ref_tensor",
        "Captured graphs keep their results by it; on an out-of-tree platform it is a compiled operator of vLLM's.",
    ),
    Replacement(
        "vllm.v1.worker.gpu_worker:kernel_warmup",
        "It imports fusion passes that read vLLM's compiled operators, for kernels of libraries that do not run here.",
    ),
    Replacement(
        "vllm.distributed.parallel_state:GroupCoordinator.graph_capture",
        "It asserts that a group's communicator is vLLM's own for CUDA or XPU, so no graph of several ranks could be "
        "captured.",
    ),
    Replacement(
        f"{ROTARY_PACKAGE}:Phi3LongRoPEScaledRotaryEmbedding",
        "A plain module, which vLLM's CustomOp.register_oot does not replace; get_rope looks it up under this name.",
    ),
    *(
        Replacement(f"{REJECTION_SAMPLER}:{name}", "A Triton kernel for speculative decoding.")
        for name in REJECTION_KERNELS
    ),
)


def check_targets(version: str) -> list[str]:
    """The replacements for this vLLM, whose version is given as major.minor, that have no target in it, in words."""
    missing = []
    for row in REPLACEMENTS:
        if row.versions and version not in row.versions:
            continue
        module, _, attribute = row.target.partition(":")
        if module == "torch.accelerator" and torch.accelerator.is_available():
            continue
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            found = None
        for name in attribute.split("."):
            found = getattr(found, name, None)
        if found is None:
            missing.append(f"{row.target} is gone in vLLM {version}: {row.reason}")
    return missing
