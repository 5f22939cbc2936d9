"""C++ of this project for tensors in main memory: compiled once for a kind of processor, and kept for later starts."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import platformdirs

from .errors import DispatchError

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=fast")
COMPILERS = ("g++", "clang++", "c++")
LONGEST = 120.0
"""Seconds that a compiler may take."""


@cache
def load(source: Path) -> ctypes.CDLL:
    """The functions of a file, which is compiled unless that was done before.

    Args:
        source: a file whose functions have C linkage. PyTorch's OpenMP, loaded before, serves it.

    Raises:
        DispatchError: there is no compiler, or it does not compile the file.
        OSError: the result cannot be written or loaded.
    """
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), "")
    if not compiler:
        raise DispatchError(f"there is no C++ compiler ({', '.join(COMPILERS)}, or the one that CXX names)")
    files = (source, *sorted(source.parent.glob("*.h")))  # it may include any of them
    facts = "\0".join((compiler, *FLAGS, _processor())).encode()
    key = hashlib.sha256(b"\0".join((*(file.read_bytes() for file in files), facts))).hexdigest()[:32]
    kept = platformdirs.user_cache_path("fl-dispatch") / "cpp" / f"{source.stem}-{key}.so"
    if not kept.exists():
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
        except OSError:  # nothing is kept, and each process compiles
            kept = Path(tempfile.mkdtemp(prefix="fl-dispatch-"), kept.name)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:  # on one file system, for the move
            made = Path(folder, kept.name)
            _compile([*compiler.split(), *FLAGS, str(source), "-o", str(made)])
            made.replace(kept)  # whoever is second replaces it by the same
    return ctypes.CDLL(str(kept))


@cache
def why_not(source: Path) -> str:
    """Why a file cannot be compiled and loaded here, or an empty string."""
    try:
        load(source)
    except (DispatchError, OSError) as error:
        return f"{source.name} does not compile: {error}"
    return ""


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired as error:
        raise DispatchError(f"{command[0]} took more than {LONGEST:.0f} s") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise DispatchError(f"{command[0]} ended with {done.returncode}: {first}")


def _processor() -> str:
    """The instruction sets of this processor, which compiled code uses; a home directory may serve several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(sorted({line for line in lines if line.lower().startswith(("flags", "features", "cpu part"))}))
