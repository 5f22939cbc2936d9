"""Find and load the compiled operators that the hosts' CUDA wheels carry, without importing a host.

Loading registers operators and creates no CUDA context. Loading a library again, also after vLLM, does nothing.
Functions that launch Triton kernels are only located: importing their module imports the host, so the first call does.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from fl_dispatch.devices import CUDA
from fl_dispatch.devices.triton import why_unserved
from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Library:
    """One library of a wheel.

    Args:
        files: its paths in the package's folder, which differ by version; the first existing one counts.
        namespace, mark: an operator that it registers, ``torch.ops.<namespace>.<mark>``.
        capability: major compute capability of its kernels, or ``None`` for all.
        package: the module with the folder of the library.
        arguments: names of the operator's arguments, if calls pass all of them by position.
    """

    files: tuple[str, ...]
    namespace: str
    mark: str
    capability: int | None = None
    package: str = "vllm"
    arguments: tuple[str, ...] = ()

    def takes_others(self) -> str:
        """Which arguments the loaded operator takes, if they differ from what calls assume; else an empty string."""
        if not self.arguments:
            return ""
        schema = getattr(getattr(torch.ops, self.namespace), self.mark).default._schema
        names = tuple(argument.name for argument in schema.arguments)
        return "" if names == self.arguments else f"its {self.mark} takes {', '.join(names)}"

    def is_loaded(self) -> bool:
        """Whether it is loaded with kernels for GPUs: vLLM's CPU build has operators with the same names."""
        operators = getattr(torch.ops, self.namespace)
        name = f"{self.namespace}::{self.mark}"
        return hasattr(operators, self.mark) and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")


@dataclass(frozen=True)
class Launcher:
    """A function of a package that launches Triton kernels.

    Args:
        file: its file in the package's folder.
        name: its name.
        arguments: names of the arguments that calls pass.
        package: the module with the folder of the library.
    """

    file: str
    name: str
    arguments: tuple[str, ...]
    package: str = "vllm"


GENERAL = Library(("_C_stable_libtorch.abi3.so", "_C.abi3.so"), "_C", "silu_and_mul")
EXPERTS = Library(("_moe_C_stable_libtorch.abi3.so", "_moe_C.abi3.so"), "_moe_C", "topk_softmax")
PRODUCTS = Library(GENERAL.files, "_C", "cutlass_scaled_mm")
MARLIN = Library(GENERAL.files, "_C", "marlin_gemm")
MACHETE = Library(GENERAL.files, "_C", "machete_mm", capability=9)
SCANS = Library(
    GENERAL.files,
    "_C",
    "selective_scan_fwd",
    arguments=(
        *("u", "delta", "A", "B", "C", "D_", "z_", "delta_bias_", "delta_softplus", "query_start_loc", "cache_indices"),
        *("has_initial_state", "ssm_states", "null_block_id", "block_size", "block_idx_first_scheduled_token"),
        *("block_idx_last_scheduled_token", "initial_state_idx", "cu_chunk_seqlen", "last_chunk_indices"),
    ),
)
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
STATE_SPACES = (
    Launcher(
        "model_executor/layers/mamba/ops/mamba_ssm.py",
        "selective_state_update",
        (
            *("state", "x", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "state_batch_indices"),
            *("dst_state_batch_indices", "null_block_id", "out"),
        ),
    ),
    Launcher(
        "model_executor/layers/mamba/ops/ssd_combined.py",
        "mamba_chunk_scan_combined_varlen",
        (
            *("x", "dt", "A", "B", "C", "chunk_size", "cu_seqlens", "cu_chunk_seqlens", "last_chunk_indices"),
            *("seq_idx", "out", "D", "dt_bias", "initial_states", "dt_softplus", "state_dtype"),
        ),
    ),
)

DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")
"""Module names of DeepGEMM, in vLLM's order."""
HOPPER = 9
USUAL_HOME = "/usr/local/cuda"


def _folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # sys.modules holds a module without a spec
        spec = None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


@functools.cache
def why_unavailable(library: Library) -> str:
    """Load a library once in a process; return why its kernels are unavailable, or an empty string."""
    if not CUDA.detect():
        return "no NVIDIA GPU that PyTorch can use"
    if library.capability is not None and (capability := CUDA.capability(0)) and capability[0] != library.capability:
        return f"the kernels are for compute capability {library.capability}, this GPU has {capability[0]}"
    if library.is_loaded():  # the host loaded it first
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


@functools.cache
def why_not_launched(launchers: tuple[Launcher, ...]) -> str:
    """Return why these functions cannot be called here, or an empty string. Imports nothing."""
    if not CUDA.detect():
        return "no NVIDIA GPU that PyTorch can use"
    if why := why_unserved():
        return why
    return next(filter(None, map(_why_other, launchers)), "")


def _why_other(launcher: Launcher) -> str:
    """Return why a function in its package's source does not fit the calls, or an empty string."""
    folder = _folder(launcher.package)
    if folder is None:
        return f"{launcher.package} is not installed"
    path = folder / launcher.file
    if not path.is_file():
        return f"the {launcher.package} in {folder} has no {launcher.file}"
    defined = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    found = next((node for node in defined if node.name == launcher.name), None)
    if found is None:
        return f"{path} has no {launcher.name}"
    taken = {one.arg for one in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)}
    missing = [name for name in launcher.arguments if name not in taken]
    return f"{launcher.name} of {path} takes no {', '.join(missing)}" if missing else ""


@functools.cache
def deep_gemm() -> tuple[str, ...]:
    """Installed modules that may be DeepGEMM. Imports nothing; the first product imports one.

    A host's copy without its compiled extension does not count: its import succeeds, but its first product raises.
    """
    found = []
    for module in DEEP_GEMM:
        package, *inside = module.split(".")
        folder = _folder(package)
        if folder is None or not (place := folder.joinpath(*inside)).joinpath("__init__.py").is_file():
            continue
        if not place.joinpath("_C.py").is_file() or any(place.glob("_C_extension*.so")):
            found.append(module)
    return tuple(found)


@functools.cache
def why_no_deep_gemm() -> str:
    """Return why DeepGEMM cannot compile kernels here, or an empty string. Imports nothing."""
    if not CUDA.detect():
        return "no NVIDIA GPU that PyTorch can use"
    if (capability := CUDA.capability(0)) and capability[0] != HOPPER:
        return f"its scales are float32 on compute capability {HOPPER} alone, this GPU has {capability[0]}"
    if not deep_gemm():
        return f"neither {' nor '.join(DEEP_GEMM)} is installed"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = None if home else shutil.which("nvcc")
    compiler = path or str(Path(home or USUAL_HOME).absolute() / "bin" / "nvcc")
    return "" if os.access(compiler, os.X_OK) else f"it compiles its kernels with nvcc, and {compiler} is no program"
