"""Records on disk of this user's workers, for commands and a host's front end, which are separate processes.

A worker's record is written when its model is loaded, whenever it changes, and when the process ends.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import util
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from ...errors import DispatchError, text_of
from ...logger_manager import get_logger
from ..layers.survey import Survey
from ..start import aten
from . import processes
from .private_file import write_private
from .report import Choices, RunReport

logger = get_logger(__name__)

KEPT = 64
"""Files that are kept; older ones are removed."""

PAUSE = 2.0
"""Seconds between two checks for changes, so a record lags its worker by at most this time."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of an engine's steps; they determine the shapes of its calls.

    Args:
        dtype: of activations, such as ``bfloat16``.
        tensor_parallel: ranks that share each layer.
        requests: the largest number of requests that a step decodes.
        step_tokens: the largest number of tokens of a step.
        eager: whether no graph is captured.
        compiled: whether the model is compiled; unknown in older records.
    """

    dtype: str
    tensor_parallel: int
    requests: int
    step_tokens: int
    eager: bool
    compiled: bool = False


@dataclass(frozen=True)
class Run:
    """One worker.

    Args:
        host: the host and its version.
        pid: the worker's process.
        model: the checkpoint.
        time: seconds since the epoch.
        layers: class name → (operator, number of layers) for layers that run through the core.
        native: class name → number of layers left to the host's own code.
        undispatched: operator → layers that claimed it and never dispatched it.
        aten: PyTorch's operators, in one line: the replaced ones, and those among them that were called.
        rank: the worker's number in its engine.
        device: its device's name.
        began: the process's start time, which distinguishes it from a later one with the same number.
        ancestors: its ancestor processes, nearest first, each with its start time.
        updated: time of the last write, in seconds since the epoch.
        runner: its model runner among the host's, and why; empty for a host with only one.
        choices: the choices in force, see :class:`~fl_dispatch.hosting.records.report.RunReport`.
        layer_choices: the host's own choices next to ours, see :class:`~fl_dispatch.hosting.layers.survey.LayerChoice`.
        sizes: the fields of :class:`Sizes`; empty in older records.
        says_end: whether a worker records a normal end, because its host does not kill it.
        ended: the error that ended the process, empty for none; ``None`` if no end is recorded.
    """

    host: str
    pid: int
    model: str
    time: float
    layers: dict[str, tuple[str, int]]
    native: dict[str, int]
    undispatched: dict[str, list[str]]
    aten: str = ""
    rank: int = 0
    device: str = ""
    began: int = 0
    ancestors: list[tuple[int, int]] = field(default_factory=list)
    updated: float = 0.0
    runner: str = ""
    choices: Choices = field(default_factory=dict)
    layer_choices: list[dict[str, Any]] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)
    says_end: bool = False
    ended: str | None = None

    @property
    def alive(self) -> bool:
        """Whether the process still exists."""
        began = processes.began(self.pid)
        return began is not None and self.began in (0, began)

    @property
    def crash(self) -> str:
        """Return how the process ended early, as the end of a sentence; empty if it did not."""
        if self.alive or (self.ended is None and not self.says_end):
            return ""
        if self.ended is None:
            return "ended without recording it, so it crashed or was killed; its log may say more"
        return self.ended and f"ended with {self.ended}"

    def descends_from(self, pid: int) -> bool:
        """Whether it is a worker of a running process, or this process itself."""
        family = [(self.pid, self.began), *map(tuple, self.ancestors)]
        return (pid, processes.began(pid)) in family

    def names(self, pid: int) -> bool:
        """Whether a process number is the worker's own or an ancestor's, also after their end."""
        return pid == self.pid or any(pid == ancestor for ancestor, _ in self.ancestors)


def folder() -> Path:
    """Return the directory of the records, below the user's own state directory."""
    return user_state_path("fl_dispatch") / "runs"


class Recorder:
    """Recorder that keeps this process's record up to date, in a thread that checks for changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run: Run | None = None
        self._report = RunReport()
        self._written: Choices = {}
        self._pid = 0
        self._refused = False

    def begin(self, run: Run) -> None:
        """Write a record, replacing an earlier one of this process, and check for changes from now on."""
        forked = self._pid != os.getpid()
        if forked:  # another thread of the parent may have held it
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            self._run, self._written = run, {}
        self.update()
        if forked:
            atexit.register(self.end)
            util.Finalize(None, self.end, exitpriority=100)  # a child of multiprocessing runs no atexit functions
            threading.Thread(target=self._watch, args=(self._pid,), name="fl_dispatch run record", daemon=True).start()

    def end(self, error: BaseException | None = None) -> None:
        """Write the final record, with the error that ends the process: the given one, or the current one."""
        if self._run is None or self._run.ended is not None:
            return
        error = error or sys.exception() or _last_error()
        planned = error is None or isinstance(error, SystemExit | KeyboardInterrupt)
        said = "" if error is None or planned else _first_line(error)
        self._run, self._written = replace(self._run, ended=said), {}
        self.update()

    def update(self) -> None:
        """Write the record if it has changed; log one WARNING if it cannot be written."""
        if self._run is None or self._pid != os.getpid():  # a forked child leaves its parent's record alone
            return
        with self._lock:
            choices = self._report.choices()
            if choices == self._written:
                return
            run = replace(self._run, choices=choices, updated=time.time(), aten=aten.describe())
            try:
                write_private(_file(run.pid), json.dumps(asdict(run)), "the record of this run")
            except DispatchError as error:
                if not self._refused:
                    logger.warning("fl doctor will not show this process: %s", error)
                self._refused = True
                return
            self._written = choices

    def _watch(self, pid: int) -> None:
        while os.getpid() == pid:
            time.sleep(PAUSE)
            self.update()


_recorder = Recorder()


def record(
    host: str,
    model: str,
    survey: Survey,
    undispatched: dict[str, list[str]],
    rank: int = 0,
    runner: str = "",
    sizes: Sizes | None = None,
    *,
    says_end: bool = False,
) -> None:
    """Write a record of this process and keep it up to date; only log a WARNING if it cannot be written."""
    pid = os.getpid()
    run = Run(
        host, pid, model, time.time(), survey.ours, survey.native, undispatched,
        rank=rank,
        device=processes.device_name(),
        began=processes.began(pid) or 0,
        ancestors=processes.ancestors(pid),
        runner=runner,
        layer_choices=[asdict(choice) for choice in survey.choices],
        sizes={} if sizes is None else asdict(sizes),
        says_end=says_end,
    )  # fmt: skip
    _recorder.begin(run)
    with suppress(OSError):  # another worker may be removing the same file
        for old in sorted(folder().glob("*.json"), key=lambda file: file.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)


@contextmanager
def ending() -> Iterator[None]:
    """Record the error that ends this process, because its host kills a process that raised one."""
    try:
        yield
    except Exception as error:
        _recorder.end(error)
        raise


def _last_error() -> BaseException | None:
    """Return the error with which Python ended this program; an interactive one, such as a notebook, goes on."""
    return None if is_interactive() else getattr(sys, "last_value", None)


def is_interactive() -> bool:
    """Whether a person types this program: in Python's prompt (``python -i``), IPython or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "IPython" in sys.modules


def _first_line(error: BaseException) -> str:
    return text_of(error).partition("\n")[0][:300]


def _file(pid: int) -> Path:
    return folder() / f"{pid}.json"


def recorded(place: Path | None = None) -> list[Run]:
    """Return the records in a directory (this user's by default), newest first; skip files that are not records."""
    found = []
    for file in (folder() if place is None else place).glob("*.json"):
        with suppress(OSError, ValueError, TypeError):
            found.append(Run(**json.loads(file.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda run: run.time, reverse=True)


def named(place: str) -> list[Run]:
    """Return the workers of one engine, by rank.

    Args:
        place: the process number of a worker or of its server, or a directory of records.

    Raises:
        DispatchError: there is no such run; the message lists the newest runs.
    """
    if not place.isdigit():
        found = recorded(Path(place))
        if not found:
            raise DispatchError(f"--run {place}: no such directory, or no record of a worker in it")
        return in_order(found)
    found = [run for run in recorded() if run.names(int(place))]
    if alive := [run for run in found if run.descends_from(int(place))]:
        found = alive  # an earlier process had the same number
    if not found:
        known = ", ".join(f"{run.pid} ({run.host}, {'running' if run.alive else 'ended'})" for run in recorded()[:5])
        raise DispatchError(f"--run {place}: no worker of that process left a record; the newest are {known or 'none'}")
    return in_order(found)


def of_engine() -> list[Run]:
    """Return the running workers of this front end's engine.

    They descend from this process, or from its parent if the parent started several front ends.
    """
    alive = [run for run in recorded() if run.alive]
    for root in (os.getpid(), os.getppid()):
        if mine := [run for run in alive if run.descends_from(root)]:
            return in_order(mine)
    return []


def in_order(found: Iterable[Run]) -> list[Run]:
    """Return records by rank, then by process."""
    return sorted(found, key=lambda run: (run.rank, run.pid))


def differences(found: list[Run]) -> dict[str, dict[str, list[int]]]:
    """Return operators with different choices among ranks: operator → implementations → the ranks."""
    different = {}
    for op_name in sorted({op_name for run in found for op_name in run.choices.get("decisions", {})}):
        ranks: dict[str, list[int]] = {}
        for run in found:
            ranks.setdefault(chosen(run, op_name), []).append(run.rank)
        if len(ranks) > 1:
            different[op_name] = ranks
    return different


def used(run: Run) -> list[str]:
    """Return the operators that the model's layers are bound to or that ran; all operators for an older record."""
    found = run.choices.get("used")
    return list(run.choices.get("decisions") or () if found is None else found)


def chosen(run: Run, op_name: str) -> str:
    """Return the implementation that a worker runs for an operator, or ``none``."""
    decision: dict[str, Any] = run.choices.get("decisions", {}).get(op_name, {})
    return next((each["impl_id"] for each in decision.get("considered", ()) if each["status"] == "chosen"), "none")
