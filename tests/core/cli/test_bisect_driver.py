"""``fl bisect`` starts each engine in a driver's process: both end with the investigation, whatever they are doing."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from fl_dispatch.cli.bisect import driver
from fl_dispatch.cli.engines import Start
from fl_dispatch.cli.hosts import Host

START = Start(Host.VLLM, "", True, 1, "float32", 0, {})
PATIENCE = 180


class HangingEngine:
    """An engine that has a process of its own, and never ends its answer."""

    def __init__(self, start: Start) -> None:
        self._worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def score(self, pids: str) -> None:
        Path(pids).write_text(f"{multiprocessing.current_process().pid} {self._worker.pid}\n")
        time.sleep(600)


WAITING = os.environ.get("OMP_WAIT_POLICY", "")
"""The variable when this process imported this file, in a driver's process before anything else of the project."""


def leave_variable(pipe: Connection, start: Start, log: Path | None) -> None:
    """A driver that leaves what its process had in the variable when it began."""
    Path(start.model).write_text(WAITING)
    pipe.send((True, None))


def test_variables_are_there_before_a_driver_loads_any_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(driver, "drive", leave_variable)
    variables = {"VLLM_FL_CONFIG": str(tmp_path / "config.yaml"), **driver.SLEEPING}
    driver.DriverEngine(replace(START, model=str(tmp_path / "left")), (), variables, None, PATIENCE).stop()
    assert (tmp_path / "left").read_text() == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in os.environ


def drive(pipe: Connection) -> None:
    driver.ENGINES = {Host.VLLM: HangingEngine}  # type: ignore[misc]
    driver.drive(pipe, START, None)


def investigate(pids: str) -> None:
    """An investigation that waits for a score."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    spawn.Process(target=drive, args=(theirs,)).start()
    theirs.close()
    assert pipe.recv() == (True, None)
    pipe.send(("score", (pids,)))
    pipe.recv()


def _until(holds: Any) -> bool:
    late = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > late:
            return False
        time.sleep(0.05)
    return True


def test_an_engine_in_the_middle_of_an_answer_ends_with_its_investigation(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    investigation = multiprocessing.get_context("spawn").Process(target=investigate, args=(str(pids),))
    investigation.start()
    processes: list[psutil.Process] = []
    try:
        assert _until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        processes = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        assert all(process.is_running() for process in processes)
        investigation.kill()
        investigation.join()
        assert _until(lambda: not any(_lives(process) for process in processes))
    finally:
        investigation.kill()
        for process in filter(_lives, processes):
            process.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
