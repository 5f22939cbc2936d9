"""Separate processes for engines and other programs: forks of a warm process, or cold starts.

``pool`` limits how many of them run at a time.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

S = TypeVar("S")
T = TypeVar("T")

AT_ONCE = 1 if "FL_SUITE" in os.environ else max(2, (os.cpu_count() or 2) // 4)
"""Processes that this one starts at a time: an engine needs one core, and the suite runs two units at once."""

pool = ThreadPoolExecutor(AT_ONCE)

KEPT = 32_000
"""Characters kept of a log's end for an error: the stacks of a crashed engine take about 20 000."""

always_cold = False
"""Set if imports of the warm process start threads, as the drivers of a GPU do: a fork would lose them."""


@dataclass(frozen=True)
class Finished:
    """A process that ended."""

    returncode: int
    log: str

    @property
    def last_line(self) -> str:
        """Return the last line of the output, usually the error."""
        return self.log.strip().rpartition("\n")[2]


def free_port() -> int:
    """Return a TCP port that a program can bind seconds later on any address of this machine, also with IPv6.

    The port lies below the kernel's ephemeral ports, because a connection of another test could take one of these. It
    is not drawn from a seeded generator: two test files with the same seed would get the same ports.
    """
    families = [socket.AF_INET, socket.AF_INET6] if socket.has_dualstack_ipv6() else [socket.AF_INET]
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        if all(_is_free(family, port) for family in families):
            return port


def _is_free(family: socket.AddressFamily, port: int) -> bool:
    with socket.socket(family) as probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


class Runs(Mapping[str, Any]):
    """Name → result of a process, waited for at first access; a failed process fails only the tests that access it."""

    def __init__(self, started: Mapping[str, Future[Any]]) -> None:
        self._started = dict(started)

    def __getitem__(self, name: str) -> Any:
        return self._started[name].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._started)

    def __len__(self) -> int:
        return len(self._started)


def then(started: Future[S], change: Callable[[S], T]) -> Future[T]:
    """Return a future of ``change`` applied to a future's result; an error of either is its error."""
    found: Future[T] = Future()

    def answer(ended: Future[S]) -> None:
        try:
            found.set_result(change(ended.result()))
        except BaseException as error:
            found.set_exception(error)

    started.add_done_callback(answer)
    return found


class Process(Protocol):
    """A started process, leader of a session of its own."""

    pid: int

    def wait(self) -> int: ...


class Fork:
    """A fork of a warm process, which runs a command line of Python."""

    def __init__(
        self, address: str, arguments: Sequence[str], environment: Mapping[str, str], output: int, errors: int
    ) -> None:
        request = {"arguments": arguments, "environment": dict(environment), "directory": os.getcwd()}
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        text = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self._connection, [text], [output, errors])
        self._connection.sendall(text[sent:])
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())

    def wait(self) -> int:
        with self._connection, self._answers:
            return int(self._answers.readline())


def begin(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    errors: int,
    cold: bool = False,
    address: str = "",
) -> Process:
    """Start Python in a separate process that writes to files of this process; see :func:`python`."""
    if cold or always_cold:
        told = {**environment, "PYTHONFAULTHANDLER": "1"}
        return subprocess.Popen(
            [sys.executable, *arguments], env=told, stdout=output, stderr=errors, start_new_session=True
        )
    return Fork(address or warm(), arguments, environment, output, errors)


@cache
def warm() -> str:
    """Return the address of this environment's warm process: the suite's, or one that ends with this process."""
    if given := os.environ.get("FL_SUITE_WARM"):
        return given
    address, _ = start_warm(Path(sys.executable), Path(tempfile.mkdtemp(prefix="fl-warm-"), "socket"))
    return address


def start_warm(interpreter: Path, address: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a warm process (``warm.py``); it ends when the pipe to it does.

    Args:
        interpreter: of the environment.
        address: of its socket, which does not exist yet.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [interpreter, Path(__file__).with_name("warm.py"), address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    while not address.exists():
        time.sleep(0.02)
        if process.poll() is not None:
            raise RuntimeError(f"the warm process of {interpreter} ended with {process.returncode}")
    return str(address), process


def python(
    *arguments: str,
    environment: Mapping[str, str],
    timeout: float = 300,
    cold: bool = False,
    errors: IO[bytes] | None = None,
    address: str = "",
) -> Finished:
    """Run Python in a process of its own; if its time is up, or the test is interrupted, its children end with it.

    If it crashes, its log has the stacks of its threads.

    Args:
        arguments: of Python; a script, ``-c`` or ``-m`` comes first.
        environment: all of it.
        timeout: seconds.
        cold: whether Python is really started; else a warm process forks. As proof of the start, and where the start
            is what is tested.
        errors: a file for standard error; else it is in the log, between the lines of standard output.
        address: of the warm process, if it is not this environment's.
    """
    deadline = time.monotonic() + timeout
    reader, writer = os.pipe()
    second = writer if errors is None else errors.fileno()
    try:
        process = begin(arguments, environment, writer, second, cold, address)
    finally:
        os.close(writer)
    log = bytearray()
    with open(reader, "rb", buffering=0) as output:
        try:
            while True:
                ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(arguments, timeout, bytes(log[-KEPT:]))
                if not (chunk := output.read(1 << 16)):
                    break
                log += chunk
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    return Finished(process.wait(), log.decode(errors="replace"))


def finish(script: Path, job: Mapping[str, Any], environment: Mapping[str, str], cold: bool = False) -> dict[str, Any]:
    """Run a script on a job; its result, with the log."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "job.json"), Path(folder, "result.json")
        request.write_text(json.dumps(job))
        ended = python(str(script), str(request), str(answer), environment=environment, timeout=600, cold=cold)
        if ended.returncode != 0 or not answer.exists():
            raise AssertionError(f"the engine ended with {ended.returncode}:\n{ended.log[-KEPT:]}")
        return {**json.loads(answer.read_text()), "log": ended.log}
