"""Facts about processes of this machine from ``/proc``; unknown on systems without it."""

from __future__ import annotations

from pathlib import Path

from ...devices import detect_device
from ...errors import text_of

MOST_ANCESTORS = 32


def began(pid: int) -> int | None:
    """Return the start time of a process, in the kernel's ticks since boot; ``None`` if no such process exists."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def ancestors(pid: int) -> list[tuple[int, int]]:
    """Return the ancestors of a process, nearest first, each with its start time."""
    found: list[tuple[int, int]] = []
    fields = _stat(pid)
    while fields is not None and len(found) < MOST_ANCESTORS:
        parent = int(fields[1])
        if parent <= 1:
            break
        fields = _stat(parent)
        if fields is not None:
            found.append((parent, int(fields[19])))
    return found


def device_name() -> str:
    """Return the name of this process's device."""
    device = detect_device()
    try:
        return device.device_name(0)
    except Exception as error:  # a vendor's code; an error must not stop a record
        return f"{device.name} ({text_of(error)})"


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on, which follow the command's name in parentheses."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
