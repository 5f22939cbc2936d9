"""Move the plain memory of weights that have a packed copy to a disk, so that main memory holds each weight once.

A weight keeps its address and its contents: its pages become a private mapping of a file without a name. The system
reads a page from the disk when anything touches it, such as PyTorch, NumPy, an address that was kept, or a system call,
and a write takes the page back into memory. Readers and writers need not know, so none of them can be missed.

Only memory that glibc mapped for one buffer is moved, because glibc unmaps it when the buffer is freed: no later buffer
gets these pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from ... import native, weight_forms
from ...logger_manager import get_logger

logger = get_logger(__name__)

VARIABLE = "VLLM_FL_PAGE_OUT"
PAGE, MIB = mmap.PAGESIZE, 1 << 20
TRIED = 4 * MIB
"""Bytes of the file by which a folder is tried."""
_MAY_MOVE_TO_ADDRESS = 3  # MREMAP_MAYMOVE | MREMAP_FIXED
_WORD, _MAPPED, _FLAGS = ctypes.sizeof(ctypes.c_size_t), 2, 7  # of the header of glibc's buffers


def check(folder: Path) -> None:
    """Check that weights can be moved to a folder.

    Raises:
        ValueError: the folder cannot be written, or is in main memory.
    """
    try:
        in_memory = _stays_in_memory(folder)
    except OSError as error:
        raise ValueError(f"{VARIABLE}: {folder} is no folder that can be written: {error}") from error
    if in_memory:
        raise ValueError(f"{VARIABLE}: {folder} is in main memory; name a folder on a disk")


def page_out(weights: Iterable[Tensor], folder: Path) -> int:
    """Move the pages of weights that products use in another form; return the number of bytes that were moved.

    A weight that was written since its form was made stays, and so does memory of another kind. The caller ensures that
    nothing writes the weights meanwhile.
    """
    places = {place[0]: place for weight in weights if (place := _pages(weight)) is not None}
    size, moved = sum(length for _, length in places.values()), 0
    try:
        if (pinned := _pinned()) != "0 kB":
            raise OSError(f"{pinned} of this process are pinned, and a device may write there unnoticed")
        if size > (free := shutil.disk_usage(folder).free):
            raise OSError(f"{size // MIB} MiB are needed in {folder}, and {free // MIB} MiB are free")
        for start, length in places.values():
            _move(start, length, folder)
            moved += length
    except OSError as error:
        logger.warning("weights: %d of %d MiB stay in memory: %s", (size - moved) // MIB, size // MIB, error)
    else:
        logger.info("weights: %d MiB moved to %s", moved // MIB, folder)
    return moved


def _pages(weight: Tensor) -> tuple[int, int] | None:
    """Return the start and the length of the whole pages of a weight that may be moved."""
    if weight.get_device() >= 0 or not weight_forms.rests(weight):  # host memory has no number
        return None
    (address,), size = native.addresses([weight]), weight.untyped_storage().nbytes()
    assert address is not None
    start, end = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    return (start, end - start) if end > start and _is_mapped_alone(address, size) else None


def _is_mapped_alone(address: int, size: int) -> bool:
    """Whether glibc mapped this buffer alone, by the test that glibc makes before it unmaps one."""
    if address % PAGE < 2 * _WORD:  # a header would be on another page, which need not exist
        return False
    before, header = (ctypes.c_size_t.from_address(address - words * _WORD).value for words in (2, 1))
    length, start = header & ~_FLAGS, address - 2 * _WORD - before
    is_mapped = header & _FLAGS == _MAPPED and not start % PAGE and not (before + length) % PAGE
    return is_mapped and size + 2 * _WORD <= length <= size + 2 * PAGE


def _move(start: int, length: int, folder: Path) -> None:
    """Replace pages by a private mapping of a file with the same contents.

    The file reaches the disk first, because a later failure would lose pages, and the contents are compared before one
    system call exchanges the pages.

    Raises:
        OSError: the file cannot be written or mapped, or has other contents; then nothing changed.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write((ctypes.c_char * length).from_address(start))
        file.flush()
        os.fsync(file.fileno())
        access = mmap.PROT_READ | mmap.PROT_WRITE
        copy = _system("mmap", 0, length, access, mmap.MAP_PRIVATE, file.fileno(), 0)
        try:
            if ctypes.CDLL(None).memcmp(*map(ctypes.c_size_t, (copy, start, length))):
                raise OSError(f"a file in {folder} has other contents than were written")
            _system("madvise", copy, length, mmap.MADV_DONTNEED)
        except OSError:
            _system("munmap", copy, length)
            raise
        try:
            _system("mremap", copy, length, length, _MAY_MOVE_TO_ADDRESS, start)
        except OSError:  # the old pages may be gone, and nothing may compute without them
            logger.critical("the pages of a weight were lost while they were exchanged", exc_info=True)
            os.abort()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _system(name: str, *arguments: int) -> int:
    """Call the system, and return an address if the call returns one."""
    function: Any = ctypes.CDLL(None, use_errno=True)[name]
    function.restype = ctypes.c_ssize_t if name in ("mmap", "mremap") else ctypes.c_int
    found: int = function(*map(ctypes.c_size_t, arguments))
    if found == -1:
        raise OSError(error := ctypes.get_errno(), f"{name}: {os.strerror(error)}")
    return found


def _pinned() -> str:
    """Return the amount of this process's pinned memory, as the system writes it."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return lines.get("VmPin", "0 kB").strip()


def _stays_in_memory(folder: Path) -> bool:
    """Whether a file of a folder stays in memory after the system was asked to drop it.

    The first page of the file is written and the last one is not. A system that reports both as being in memory gives
    no information, so the answer is then no.
    """
    pages = (ctypes.c_ubyte * (TRIED // PAGE))()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PAGE))
        file.truncate(TRIED)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = _system("mmap", 0, TRIED, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
        try:
            _system("mincore", mapped, TRIED, ctypes.addressof(pages))
        finally:
            _system("munmap", mapped, TRIED)
    return bool(pages[0] & 1) and not pages[-1] & 1
