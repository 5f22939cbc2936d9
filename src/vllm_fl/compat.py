"""Every place where a host attribute is replaced or added at run time, and every difference between host versions.

Nothing else in this package replaces vLLM's or PyTorch's attributes. Each replacement is a row of :data:`REPLACEMENTS`
with its reason and the host versions it is for; :func:`check_targets` finds the rows whose target has moved.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import variable_names

from . import host_names, kv_layout, rejection

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.kv_cache_layout import KVCacheLayout

logger = get_logger(__name__)


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


def host_version() -> str:
    """vLLM's version as major.minor."""
    from vllm.version import __version__

    return ".".join(__version__.split(".")[:2])


TESTED_HOSTS = ("0.32",)
"""All engine tests run on these."""

SMOKE_TESTED_HOSTS = ("0.26", "0.33")
"""On these small models ran on a CPU, eagerly and in one process, with right tokens; no other tests."""


@cache
def warn_of_untested_host() -> None:
    """One WARNING on a vLLM that not all tests ran on, with what is known to be missing there."""
    version, tested = host_version(), ", ".join(TESTED_HOSTS)
    if version not in TESTED_HOSTS:
        gone = [*check_targets(), *host_names.missing(version)]
        missing = "; ".join(gone) or "every name that is replaced or relied on is there"
        how = "only smoke-tested" if version in SMOKE_TESTED_HOSTS else "not a tested version"
        logger.warning("vLLM %s is %s (tested: %s): %s", version, how, tested, missing)


def check_targets() -> list[str]:
    """The replacements for this host version whose target does not exist, in words."""
    missing = []
    for row in REPLACEMENTS:
        if row.versions and host_version() not in row.versions:
            continue
        module, _, attribute = row.target.partition(":")
        if module == "torch.accelerator" and torch.accelerator.is_available():
            continue
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name, None)
        if found is None:
            missing.append(f"{row.target} is gone in vLLM {host_version()}: {row.reason}")
    return missing


# -- environment variables --------------------------------------------------------------------------------------------


def declare_variables() -> None:
    """Tell vLLM the names of our environment variables. Idempotent; also right when the platform stays off."""
    from vllm import envs

    for name in variable_names():
        if name.startswith("VLLM_"):
            envs.environment_variables.setdefault(name, _reader(name))


def _reader(name: str) -> Callable[[], str | None]:
    return lambda: os.environ.get(name)


def in_tree_platform() -> str | None:
    """The name of the vLLM platform that would run without ours, or ``None``."""
    from vllm import platforms

    return next((name for name, found in platforms.builtin_platform_plugins.items() if found() is not None), None)


# -- torch.accelerator without an accelerator -------------------------------------------------------------------------


def _no_accelerator(*args: Any, **kwargs: Any) -> None:
    return None


def silence_accelerator() -> None:
    """Make the ``torch.accelerator`` calls of vLLM's shared code do nothing where PyTorch has no accelerator."""
    if not torch.accelerator.is_available():
        for name in ("empty_cache", "empty_host_cache", "synchronize"):
            setattr(torch.accelerator, name, _no_accelerator)


# -- Triton kernels of the model runner -------------------------------------------------------------------------------


def slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slots: torch.Tensor,
    block_size: int,
    total_cp_world_size: int,
    total_cp_rank: int,
    cp_interleave: int,
    pad_id: int,
    *_: Any,
) -> None:
    """The cache slot of every token: ``block_table[request, position // block] * block + position % block``.

    Args:
        num_tokens, max_num_tokens: slots between these two are padding and get ``pad_id``.
        query_start_loc: ``[requests + 1]``; the requests' first tokens.
        positions: ``[tokens]``; position of each token in its sequence.
        block_table: ``[requests, blocks]``.
        slots: ``[max_num_tokens]``; overwritten.
    """
    if total_cp_world_size != 1:
        raise NotImplementedError("context parallelism is not supported by vllm_fl on this device")
    requests = torch.repeat_interleave(query_start_loc.diff())
    where = positions[: requests.shape[0]]
    blocks = block_table[requests, where // block_size].long()
    slots[: requests.shape[0]] = blocks * block_size + where % block_size
    slots[num_tokens:max_num_tokens] = pad_id


def replace_kernels() -> None:
    """Replace the Triton kernels that the V1 model runner launches. Idempotent."""
    if host_version() == "0.26":
        return _replace_kernels_by_name()
    from vllm.triton_utils.dispatcher import KernelOverride, register_kernels
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    if not isinstance(ComputeSlotMappingKernel.kernel, KernelOverride):
        rejections = {f"{REJECTION_SAMPLER}.{name}": getattr(rejection, name) for name in REJECTION_KERNELS}
        register_kernels({SLOT_MAPPING_KERNEL: slot_mapping, **rejections})
    return None


class _Launched:
    """A function in the place of a Triton kernel, which is called as ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **constants: self._function(*arguments, *constants.values())


def _slot_mapping_of_0_26(*arguments: Any) -> None:
    """:func:`slot_mapping` with the parameters of vLLM 0.26: another order, and two sizes of blocks more."""
    *before, block_size, slots, _kv_cache_block_size, _blocks_per_kv_block = arguments[:10]
    slot_mapping(*before, slots, block_size, *arguments[10:])


def _replace_kernels_by_name() -> None:
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker import block_table
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner._postprocess_triton = lambda runner: None
    block_table._compute_slot_mapping_kernel = _Launched(_slot_mapping_of_0_26)
    for name in REJECTION_KERNELS:
        setattr(rejection_sampler, name, _Launched(getattr(rejection, name)))


# -- host memory that a GPU reads -------------------------------------------------------------------------------------


class _HostMemory:
    """Pinned memory as CUDA's array interface describes it; a tensor made of it keeps it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": tuple(tensor.shape),
            "typestr": tensor.numpy().dtype.str,
            "strides": tuple(step * tensor.element_size() for step in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }


def gpu_view(cpu_tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the current GPU over the memory of a pinned one, which has one address on both sides.

    Raises:
        ValueError: the tensor is not pinned.
    """
    if not cpu_tensor.is_pinned():
        raise ValueError("a GPU can only read host memory that is pinned")
    return torch.as_tensor(_HostMemory(cpu_tensor), device=f"cuda:{torch.cuda.current_device()}")


def unowned_view(tensor: Any) -> Any:
    """The same memory, without keeping it alive: the memory pool of captured graphs does that."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda or not tensor.numel():
        return tensor
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def warm_up_kernels(worker: Any) -> None:
    """Compile the Triton kernels of the V1 model runner's block table; the other runners' are warm after a batch."""
    if not worker.use_v2_model_runner and not worker.model_runner.is_pooling_model:
        from vllm.model_executor.warmup.v1_block_table_warmup import warm_v1_block_table_kernels

        warm_v1_block_table_kernels(worker.device, worker.scheduler_config.max_num_batched_tokens)


def do_without_library() -> None:
    """Replace what vLLM's GPU worker and its V2 model runner take from vLLM's compiled library. Idempotent."""
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.utils import torch_utils
    from vllm.v1.worker import gpu_worker

    from .distributed import any_communicator

    buffers: Any = importlib.import_module(BUFFERS)
    offer_latent_prefill()
    buffers.get_accelerator_view_from_cpu_tensor = gpu_view
    torch_utils.weak_ref_tensor = unowned_view
    gpu_worker.kernel_warmup = warm_up_kernels
    if not hasattr(GroupCoordinator.graph_capture, "fl_original"):
        GroupCoordinator.graph_capture = any_communicator(GroupCoordinator.graph_capture)


# -- the worker -------------------------------------------------------------------------------------------------------


def make_workspace_and_runner(worker: Any) -> None:
    """Give a worker its workspace and its model runner; in vLLM 0.26 no method of its own does only that."""
    if hasattr(worker, "_init_workspace_and_model_runner"):
        worker._init_workspace_and_model_runner()
        return
    from vllm.v1.worker.workspace import init_workspace_manager

    if worker.device.type == "cpu":
        replace_kernels()  # 0.26 has no hook of the platform for it
        offer_latent_prefill()
        plan_context_unpinned()
    init_workspace_manager(worker.device, 1)
    worker.model_runner = worker._make_model_runner()


# -- models -----------------------------------------------------------------------------------------------------------

UNBALANCED_IN_FLOAT16 = ("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration", "LagunaForCausalLM")
"""For float16 vLLM divides the shared experts by the scale of the routed ones, so that sums stay small, and a decoder
layer has to divide the rest as well. DeepSeek's do; these do not, so their tokens are wrong on every platform."""


def multiplies_plainly(method: Any) -> bool:
    """Whether a linear layer's method is a product with weights as they are, by PyTorch's own ``linear``.

    Later versions choose the function when the method is made, 0.26 in every call. Where the names are gone the answer
    is no, and the layers stay vLLM's.
    """
    from vllm.model_executor.layers import linear, utils

    from vllm import envs

    if type(method) is not linear.UnquantizedLinearMethod or envs.VLLM_BATCH_INVARIANT:
        return False
    in_call = host_version() == "0.26"
    chosen = utils.dispatch_unquantized_gemm() if in_call else getattr(method, "_gemm_impl", None)
    return chosen is not None and chosen is getattr(utils, "default_unquantized_gemm", None)


def is_unbalanced(model: ModelConfig) -> bool:
    """Whether vLLM would give wrong tokens for this model in float16."""
    scale = getattr(model.hf_text_config, "routed_scaling_factor", None)
    return model.dtype == torch.float16 and model.architecture in UNBALANCED_IN_FLOAT16 and scale != 1.0


# -- attention --------------------------------------------------------------------------------------------------------


class CacheQuestions:
    """What vLLM asks an attention class about the KV cache, which :mod:`vllm_fl.kv_layout` decides."""

    # vLLM 0.32 and later: the physical layouts that it can read.
    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout[kv_layout.in_force().host_name],)

    # vLLM 0.26: the shape, and the order of its axes in memory.
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        order = kv_layout.in_force().stride_order
        return (1, 0, *(axis + 1 for axis in order[1:])) if include_num_layers_dimension else order


def attention_refusals(backend: Any, config: AttentionSelectorConfig, capability: DeviceCapability | None) -> list[str]:
    """Why an attention class cannot serve a layer, in its own words; the fields to be judged differ by version."""
    known = inspect.signature(backend.validate_configuration).parameters
    fields = {name: value for name, value in config._asdict().items() if name in known}
    reasons: list[str] = backend.validate_configuration(**fields, device_capability=capability)
    return reasons


class _Unpinned(TorchFunctionMode):
    """PyTorch's functions as if nobody had asked for pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def plan_context_unpinned() -> None:
    """Let vLLM 0.26 plan the context of latent attention where no memory can be pinned. Idempotent."""
    module: Any = importlib.import_module(MLA)
    plan = module.build_mla_chunked_context_metadata
    if hasattr(plan, "__wrapped__"):
        return

    @wraps(plan)
    def unpinned(**arguments: Any) -> Any:
        with _Unpinned():
            return plan(**arguments)

    module.build_mla_chunked_context_metadata = unpinned


def offer_latent_prefill() -> None:
    """Put our prefill backend in the place of vLLM's FlashAttention, which 0.26 takes on every platform. Idempotent."""
    if host_version() == "0.26":
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )

        register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, "vllm_fl.mla_prefill.NumberedChunks")


# -- layer classes that are no CustomOp -------------------------------------------------------------------------------


def replace_class(base: type, replacement: type) -> None:
    """Put a class in the place of ``base`` in the package that holds its module; ``base`` itself undoes it."""
    package = importlib.import_module(base.__module__.rpartition(".")[0])
    setattr(package, base.__name__, replacement)
