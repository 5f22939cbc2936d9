"""Engines in separate driver processes: a crash or a hang of an engine does not affect the investigation.

Each driver leads its own session. So its child processes end with it, and Ctrl-C reaches only the investigation.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ...errors import text_of
from ...evidence.bisect.documents import Document, text
from ...evidence.bisect.probes import EngineDiedError
from ...evidence.bisect.prompts import Request
from ...evidence.bisect.scores import Scores
from ..demo.progress import CAUSE
from ..engines import Start
from ..hosts import Host
from .hosts import ENGINES

GRACE = 10.0
"""Time limit for an engine to end, in seconds."""
PLUGINS = "VLLM_FL_PLUGIN_MODULES"
SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Variables of engines with judged times: a thread that waits for others sleeps, so processor time is work alone."""


class Starter:
    """The starter of engines with the same settings.

    Args:
        start: the settings of each engine.
        rounds: the requests of each engine.
        folder: for configuration files and logs.
        patience: time limit of an engine for one step or its start, in seconds.
        variables: environment variables in addition to this process's.
        verbose: do not redirect the engines' output to logs.
    """

    def __init__(
        self,
        start: Start,
        rounds: Sequence[Sequence[Request]],
        folder: Path,
        patience: float,
        variables: Mapping[str, str] | None = None,
        verbose: bool = False,
    ) -> None:
        self._start, self._rounds, self._folder, self._patience = start, rounds, folder, patience
        self._variables, self._verbose = dict(variables or {}), verbose
        self._number = 0

    def start(self, document: Document, eager: bool = False) -> DriverEngine:
        """Start an engine under a policy.

        Raises:
            EngineDiedError: it did not start.
        """
        self._number += 1
        config = self._folder / f"engine-{self._number}.yaml"
        config.write_text(text(document), encoding="utf-8")
        variables = {
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            **self._variables,
            "VLLM_FL_CONFIG": str(config),
        }
        if self._start.host is Host.SGLANG:
            given = variables.get(PLUGINS, os.environ.get(PLUGINS, ""))
            variables[PLUGINS] = ",".join(filter(None, (given, f"{__package__}.scheduler")))
        start = replace(self._start, eager=eager or self._start.eager)
        log = None if self._verbose else self._folder / f"engine-{self._number}.log"
        return DriverEngine(start, self._rounds, variables, log, self._patience)


class DriverEngine:
    """An engine in a driver process."""

    def __init__(
        self,
        start: Start,
        rounds: Sequence[Sequence[Request]],
        variables: Mapping[str, str],
        log: Path | None,
        patience: float,
    ) -> None:
        self.ranks = start.ranks
        self._rounds, self._log, self._patience = rounds, log, patience
        self._config = Path(variables["VLLM_FL_CONFIG"])
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=drive, args=(theirs, start, log))
        before = dict(os.environ)
        os.environ.update(variables)  # OpenMP reads its variables when it is loaded, before the driver begins
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()
        try:
            self._receive()
        except BaseException:
            self.stop()
            raise

    def switch(self, document: Document, seed: int | None, ranks: Collection[int] | None) -> str:
        """See :class:`~fl_dispatch.evidence.bisect.probes.Engine`."""
        config = self._config.with_suffix(".switched.yaml")
        config.write_text(text(document), encoding="utf-8")
        return str(self._call("switch", str(config), seed, None if ranks is None else sorted(ranks)))

    def score(self) -> Scores:
        """See :class:`~fl_dispatch.evidence.bisect.probes.Engine`."""
        return Scores(*self._call("score", self._rounds))

    def watch(self, operator: str) -> None:
        """See :class:`~fl_dispatch.evidence.bisect.probes.Engine`."""
        self._call("watch", operator)

    def answers(self) -> list[dict[str, Any]]:
        """See :class:`~fl_dispatch.evidence.bisect.probes.Engine`."""
        found: list[dict[str, Any]] = self._call("answers")
        return found

    def stop(self) -> None:
        """End the driver and all its child processes."""
        with suppress(OSError, EngineDiedError):
            self._pipe.send(("stop", ()))
            self._process.join(GRACE)
        with suppress(ProcessLookupError, TypeError):
            os.killpg(self._process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        self._process.join(GRACE)
        self._pipe.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((name, arguments))
        except OSError as error:
            raise self._died(f"the engine's process is gone ({error})") from error
        return self._receive()

    def _receive(self) -> Any:
        late = time.monotonic() + self._patience
        while not self._pipe.poll(0.2):
            if not self._process.is_alive() and not self._pipe.poll(0):
                raise self._died(f"the engine's process ended with {self._process.exitcode}")
            if time.monotonic() > late:
                raise self._died(f"the engine gave no answer within {self._patience:.0f} s")
        try:
            good, answer = self._pipe.recv()
        except EOFError as error:
            raise self._died("the engine's process ended") from error
        if not good:
            raise self._died(answer)
        return answer

    def _died(self, why: str) -> EngineDiedError:
        """Return the error with its cause, which only the log has."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log and self._log.exists() else []
        causes = [found[1] for line in lines if (found := CAUSE.search(line))]
        cause = f"; first error in its log: {causes[0][:300]}" if causes and causes[0] not in why else ""
        return EngineDiedError(f"{why}{cause}" + (f" ({self._log})" if self._log else ""))


def drive(pipe: Connection, start: Start, log: Path | None) -> None:
    """Run the driver: start an engine, and execute the investigation's requests until it asks to stop."""
    with suppress(PermissionError):  # the process already leads a session
        os.setsid()
    threading.Thread(target=_end_with_investigation, daemon=True).start()
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    try:
        engine = ENGINES[start.host](start)
        pipe.send((True, None))
    except BaseException as error:  # an engine may raise anything, or exit
        pipe.send((False, text_of(error)))
        raise
    while True:
        name, arguments = pipe.recv()
        try:
            answer = getattr(engine, name)(*arguments)
        except BaseException as error:  # as above
            pipe.send((False, text_of(error)))
            raise
        if name == "stop":
            os._exit(0)
        pipe.send((True, answer))


def _end_with_investigation() -> None:
    """End this driver and its child processes as soon as the investigation ends, even if the engine is busy."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
