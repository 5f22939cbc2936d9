"""C++ of this project for tensors in main memory, compiled once a machine by PyTorch's machinery for generated code."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

FLAGS = ("-ffp-contract=fast",)  # products and sums in one instruction, which PyTorch's own flags rule out


@cache
def load(source: Path) -> ctypes.CDLL:
    """Compile a file, or find it compiled, and load its functions.

    Args:
        source: a file whose functions have C linkage. It needs no header of PyTorch's.

    Raises:
        Exception: of the compiler, the loader, or a folder, of whatever type PyTorch gives it.
    """
    from torch._inductor.codecache import CppCodeCache

    found: ctypes.CDLL = CppCodeCache.load(source.read_text(encoding="ascii"), extra_flags=FLAGS)
    return found


@cache
def why_not(source: Path) -> str:
    """Why a file cannot be compiled and loaded here, or an empty string."""
    try:
        load(source)
    except Exception as error:  # of any type; whoever asks has other implementations
        return f"{source.name} does not compile: {error}"
    return ""
