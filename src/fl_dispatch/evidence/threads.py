"""Threads of a measurement: no more than free processors, because threads that wait for each other are slow."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def usable_processors() -> int:
    """Return the number of processors that this process may use, by its affinity and its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))


def free_threads() -> tuple[int, str]:
    """Return the number of threads for PyTorch now, and why fewer than its default; ``OMP_NUM_THREADS`` is obeyed."""
    wanted = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return wanted, ""
    usable = usable_processors()
    busy = round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    free = max(1, min(wanted, usable - busy))
    return free, "" if free == wanted else f"{usable} processors, {busy} of them busy"
