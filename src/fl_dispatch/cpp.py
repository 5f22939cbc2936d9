"""Compile C++ for tensors in main memory, once for a kind of processor, and keep the library for later starts.

Loading a library runs its code, so a kept library is loaded only if no other user can have written it: folder and file
belong to this user or to root, no other user may write to them, and the file ends with the digest of its contents. If
nothing can be kept, each process compiles into a temporary folder and removes it once the code is loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import platformdirs

from .errors import DispatchError
from .logger_manager import get_logger

logger = get_logger(__name__)

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=fast")
COMPILERS = ("g++", "clang++", "c++")
LONGEST = 120.0
"""Seconds that a compiler may take."""
DIGEST = 32
"""Bytes of the digest at the end of a kept library."""
FOREIGN = stat.S_IWGRP | stat.S_IWOTH
"""Permissions that let other users write."""


@cache
def load(source: Path) -> ctypes.CDLL:
    """Return the functions of a source file, compiled now unless a kept library has them.

    Args:
        source: a file of functions with C linkage. PyTorch's OpenMP, loaded before, serves it.

    Raises:
        DispatchError: there is no compiler, or it does not compile the file.
        OSError: the result cannot be written to a temporary folder, or not loaded.
    """
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), "")
    if not compiler:
        raise DispatchError(f"there is no C++ compiler ({', '.join(COMPILERS)}, or the one that CXX names)")
    files = (source, *sorted(source.parent.glob("*.h")))  # the compiler may include any of these files
    facts = "\0".join((compiler, *FLAGS, _processor())).encode()
    key = hashlib.sha256(b"\0".join((*(file.read_bytes() for file in files), facts))).hexdigest()[:32]
    name, problem = f"{source.stem}-{key}.so", ""
    try:
        with _kept_libraries() as folder:
            if _is_whole(folder / name):
                return ctypes.CDLL(str(folder / name))
    except OSError as error:
        problem = str(error)
    with tempfile.TemporaryDirectory(prefix="fl-dispatch-") as temporary:
        made = Path(temporary, name)
        _compile([*compiler.split(), *FLAGS, str(source), "-o", str(made)])
        library = ctypes.CDLL(str(made))
        try:
            with _kept_libraries() as folder:
                _keep(made.read_bytes(), folder / name)
        except OSError as error:
            problem = problem or str(error)
            logger.info(
                "%s is compiled by each process anew, because nothing can be kept (%s); XDG_CACHE_HOME can help",
                source.name,
                problem,
            )
    return library


def _folder() -> Path:
    """Return the folder of kept libraries.

    Raises:
        OSError: this user has no such folder.
    """
    folder = platformdirs.user_cache_path("fl-dispatch")
    if not folder.is_absolute():  # the specification of XDG_CACHE_HOME says to ignore a relative path
        home = Path("~").expanduser()
        if not home.is_absolute():
            raise OSError("XDG_CACHE_HOME and HOME name no absolute path")
        folder = home / ".cache" / "fl-dispatch"
    return folder / "cpp"


@contextmanager
def _kept_libraries() -> Iterator[Path]:
    """Yield a path that keeps leading to the same folder of kept libraries, even if folders are renamed meanwhile.

    Raises:
        OSError: the folder does not exist and cannot be made, or another user may write to it.
    """
    path = _folder()
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = os.fstat(opened)
        if found.st_uid == os.geteuid() and found.st_mode & FOREIGN:
            with suppress(OSError):
                os.fchmod(opened, found.st_mode & 0o755)
            found = os.fstat(opened)
        if why := _distrust(found):
            raise PermissionError(f"{path} {why}")
        held = Path(f"/proc/self/fd/{opened}")
        yield held if held.exists() else path
    finally:
        os.close(opened)


def _distrust(found: os.stat_result) -> str:
    """Return why another user may have written a file or folder; empty if none may."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}, not to user {os.geteuid()} of this process"
    return "may be written by other users" if found.st_mode & FOREIGN else ""


def _is_whole(path: Path) -> bool:
    """Whether a path has a complete library that this module kept.

    Raises:
        OSError: the file cannot be read, or another user may have written it.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    with open(opened, "rb") as file:
        if why := _distrust(os.fstat(opened)):
            raise PermissionError(f"{path.name} {why}")
        code = file.read()
    return hashlib.sha256(code[:-DIGEST]).digest() == code[-DIGEST:]


def _keep(code: bytes, path: Path) -> None:
    """Write a library for later starts; a second process replaces the file by an equal one.

    Raises:
        OSError: the library cannot be written; no partial file stays.
    """
    opened, part = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with open(opened, "wb") as file:
            file.write(code + hashlib.sha256(code).digest())
            file.flush()
            os.fchmod(opened, 0o644)
            os.fsync(opened)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            os.unlink(part)
        raise


@cache
def why_not(source: Path) -> str:
    """Return why a file cannot be compiled and loaded here; empty if it can."""
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
    """Return the instruction sets of this processor; one home directory may serve several kinds of processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(sorted({line for line in lines if line.lower().startswith(("flags", "features", "cpu part"))}))
