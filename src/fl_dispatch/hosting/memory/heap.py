"""Keep glibc's large buffers on devices with main memory, so that the next step reuses them.

glibc asks the system for every buffer of 32 MiB and more, and returns it at once; the system then clears each page
again.
"""

from __future__ import annotations

import ctypes
import os

from ...logger_manager import get_logger

logger = get_logger(__name__)

MIB = 1 << 20
LARGEST_BUFFER = 256 * MIB
"""Bytes: smaller buffers come from the heap."""
KEPT = 512 * MIB
"""Bytes beyond those in use that the heap keeps at its end, at most."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


def give_back() -> None:
    """Return the heap's free memory to the system."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def keep_buffers() -> bool:
    """Keep this process's large buffers, unless a variable sets glibc's own limits.

    Returns:
        Whether the process keeps them; other C libraries have no such limits.
    """
    return _set_limits(
        {_MMAP_THRESHOLD: LARGEST_BUFFER, _TRIM_THRESHOLD: KEPT},
        f"keeps up to {KEPT // MIB} MiB for buffers of the next step",
    )


def map_buffers() -> bool:
    """Give each buffer of a MiB or more a mapping of its own, as :func:`keep_buffers` sets or leaves limits."""
    return _set_limits({_MMAP_THRESHOLD: MIB}, "maps each buffer of a MiB")


def _set_limits(limits: dict[int, int], what: str) -> bool:
    """Set limits of glibc's heap unless the user chose any; return whether they are set."""
    own = [name for name, value in os.environ.items() if name.startswith("MALLOC_") or "glibc.malloc" in value]
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if own or mallopt is None:
        logger.info("heap: left as it is (%s)", ", ".join(own) or "not glibc's")
        return False
    done = all(mallopt(parameter, limit) for parameter, limit in limits.items())
    logger.info("heap: %s: %s", what, done)
    return done
