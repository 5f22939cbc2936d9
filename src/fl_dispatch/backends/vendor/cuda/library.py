"""Finds and loads the compiled operators that the hosts' CUDA wheels carry, without importing a host.

Loading registers operators and creates no CUDA context. Loading a library twice, or after vLLM did, does nothing.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from fl_dispatch.devices import CUDA
from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Library:
    """One library of a wheel.

    Args:
        files: where it is in the package's folder; the first that exists counts, versions differ.
        namespace, mark: an operator that it registers, ``torch.ops.<namespace>.<mark>``.
        capability: major compute capability that its kernels are for, or ``None`` for all.
        package: the module in whose folder it is.
        arguments: names of the operator's arguments, where a call gives them all by their place.
    """

    files: tuple[str, ...]
    namespace: str
    mark: str
    capability: int | None = None
    package: str = "vllm"
    arguments: tuple[str, ...] = ()

    def takes_others(self) -> str:
        """The arguments of the loaded operator, in words, where they are not those that calls assume."""
        if not self.arguments:
            return ""
        schema = getattr(getattr(torch.ops, self.namespace), self.mark).default._schema
        names = tuple(argument.name for argument in schema.arguments)
        return "" if names == self.arguments else f"its {self.mark} takes {', '.join(names)}"

    def is_loaded(self) -> bool:
        """Whether it is loaded, for a GPU: vLLM's CPU build has operators of the same names."""
        operators = getattr(torch.ops, self.namespace)
        name = f"{self.namespace}::{self.mark}"
        return hasattr(operators, self.mark) and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")


GENERAL = Library(("_C_stable_libtorch.abi3.so", "_C.abi3.so"), "_C", "silu_and_mul")
EXPERTS = Library(("_moe_C_stable_libtorch.abi3.so", "_moe_C.abi3.so"), "_moe_C", "topk_softmax")
PRODUCTS = Library(GENERAL.files, "_C", "cutlass_scaled_mm")
MARLIN = Library(GENERAL.files, "_C", "marlin_gemm")
MACHETE = Library(GENERAL.files, "_C", "machete_mm", capability=9)
ATTENTION = Library(("vllm_flash_attn/_vllm_fa3_C.abi3.so",), "_vllm_fa3_C", "fwd", capability=9)
SGLANG_ATTENTION = Library(
    ("flash_ops.abi3.so",),
    "sgl_kernel",
    "fwd",
    capability=9,
    package="sgl_kernel",
    arguments=(
        *("q", "k", "v", "k_new", "v_new", "q_v", "out"),
        *("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k"),
        *("page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary"),
        *("q_descale", "k_descale", "v_descale", "softmax_scale", "is_causal", "window_size_left", "window_size_right"),
        *("attention_chunk", "softcap", "is_rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa"),
        *("sm_margin", "sinks", "sparse_mask_fine", "only_qv"),
    ),
)
"""The package ``sglang-kernel``, which SGLang needs on a GPU."""


def _folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec stands in sys.modules
        spec = None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


@functools.cache
def why_unavailable(library: Library) -> str:
    """Load a library, once in a process; an empty string, or why there are no kernels."""
    if not CUDA.detect():
        return "no NVIDIA GPU that PyTorch can use"
    if library.capability is not None and (capability := CUDA.capability(0)) and capability[0] != library.capability:
        return f"the kernels are for compute capability {library.capability}, this GPU has {capability[0]}"
    if library.is_loaded():  # the host was first
        return library.takes_others()
    folder = _folder(library.package)
    if folder is None:
        return f"{library.package} is not installed"
    path = next((folder / name for name in library.files if (folder / name).is_file()), None)
    if path is None:
        return f"the {library.package} in {folder} has no {library.files[0]}"
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        return f"{path} does not load: {error}"
    logger.debug("loaded %s", path)
    if not library.is_loaded():
        return f"{path} has no operator {library.mark} for GPUs"
    return library.takes_others()
