"""Records of what this user's workers ran last, on disk, because ``fl doctor`` runs in a process of its own."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from platformdirs import user_state_path

from ..errors import DispatchError
from ..logger_manager import get_logger
from . import aten
from .private_file import write_private
from .survey import Survey

logger = get_logger(__name__)

KEPT = 64
"""Files; older ones are removed."""


@dataclass(frozen=True)
class Run:
    """One worker.

    Args:
        host: the host and its version.
        pid: the worker's process.
        model: the checkpoint.
        time: seconds since the epoch.
        layers: class name → (operator, how many) for layers that run through the core.
        native: class name → how many are left to the host's own code.
        undispatched: operator → layers whose operator was claimed and never dispatched.
        aten: PyTorch's own operators, in one line: which are replaced, and which of them were called until then.
    """

    host: str
    pid: int
    model: str
    time: float
    layers: dict[str, tuple[str, int]]
    native: dict[str, int]
    undispatched: dict[str, list[str]]
    aten: str = ""

    @property
    def alive(self) -> bool:
        """Whether there is a process of that number."""
        return Path(f"/proc/{self.pid}").exists()


def folder() -> Path:
    """The directory of the files, below the user's own state directory."""
    return user_state_path("fl_dispatch") / "runs"


def record(host: str, model: str, survey: Survey, undispatched: dict[str, list[str]]) -> None:
    """Leave a file about this process. That it cannot be written is a WARNING, and nothing more."""
    run = Run(host, os.getpid(), model, time.time(), survey.ours, survey.native, undispatched, aten.describe())
    try:
        write_private(folder() / f"{run.pid}.json", json.dumps(asdict(run)), "the record of this run")
    except DispatchError as error:
        logger.warning("fl doctor will not show this process: %s", error)
        return
    with suppress(OSError):  # another worker may be removing the same
        for old in sorted(folder().glob("*.json"), key=lambda file: file.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)


def recorded() -> list[Run]:
    """The records, newest first; files that are no records are passed over."""
    found = []
    for file in folder().glob("*.json"):
        with suppress(OSError, ValueError, TypeError):
            found.append(Run(**json.loads(file.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda run: run.time, reverse=True)
