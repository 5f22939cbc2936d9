"""A warm process: it has imported slow modules, and runs each command line of Python from a client in a fork.

    python warm.py SOCKET

The import of PyTorch and of the hosts' requirements takes five seconds of processor time, a fork none. No module of a
host or of this project is imported here, so every fork resolves its platform and reads its settings anew.

A process *spawned* by a fork is a fork too, of a copy of this process, and behaves as spawned: it inherits no state,
gets its parent's environment, and imports its parent's main module again. The client is ``processes.python``.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import connection as mp_connection
from multiprocessing import context, forkserver, spawn
from typing import Any, NoReturn

SLOW = (
    "torch._inductor.compile_fx",
    "transformers.modeling_layers",
    "transformers.processing_utils",
    "transformers.models.auto.modeling_auto",
    "openai.types.responses",
    "compressed_tensors",
    "fastapi",
    "aiohttp",
    "xgrammar",
    "pytest",
)
"""Modules of the hosts' requirements; each environment has those that its host needs."""

FORBIDDEN = ("vllm", "sglang", "fl_dispatch", "vllm_fl", "sglang_fl", "fl_transfer")
"""Packages that keep state of the process that imported them."""

ENVIRONMENT = "environment of the parent"
"""Key added to the data that multiprocessing sends to a spawned process."""


def main(address: str) -> None:
    """Serve until standard input ends."""
    paths = sys.path[1:]  # without this folder
    for name in SLOW:
        if find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    assert not set(FORBIDDEN) & set(sys.modules), "a fork could not import it anew"
    assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1, "a fork keeps one thread only"
    gc.freeze()  # else every fork copies what its collector looks at
    _end(_become, _serve(address), paths)


def _serve(address: str) -> dict[str, Any]:
    """Fork for each connection; return the request in the fork that is to run it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        unnoticed = f"{address}.new"
        listener.bind(unnoticed)
        listener.listen()
        os.rename(unnoticed, address)  # a caller who sees the address may connect: before, it would be refused
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                os._exit(0)
            accepted, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                return _keep(accepted)
            accepted.close()


def _keep(connection: socket.socket) -> dict[str, Any]:
    """Fork once more and wait for that process; send the client its number and then its exit status."""
    text, (output, errors), _, _ = socket.recv_fds(connection, 1 << 16, 2)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 16)
    pid = os.fork()
    if pid == 0:
        connection.close()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.close(output)
        os.close(errors)
        request: dict[str, Any] = json.loads(text)
        return request
    os.close(output)
    os.close(errors)
    connection.sendall(b"%d\n" % pid)
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:  # the client has closed the connection
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(request: dict[str, Any], paths: list[str]) -> None:
    """Set this process up as Python would have started it."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    _spawn_by_forking()
    first, *rest = request["arguments"]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    script_folder = {"-c": "", "-m": os.getcwd()}.get(first, os.path.dirname(os.path.abspath(first)))
    sys.path[:] = [script_folder, *given, *paths]
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if first == "-c":
        sys.argv, code = ["-c", *rest[1:]], compile(rest[0], "<string>", "exec")
    else:
        sys.argv, module.__file__ = [first, *rest], first
        with open(first, "rb") as file:
            code = compile(file.read(), first, "exec")
    exec(code, module.__dict__)


def _end(run: Callable[..., None], *arguments: Any) -> NoReturn:
    """End as Python does, but without finalizing modules, which takes longer than the rest of a short process."""
    try:
        run(*arguments)
        code = 0
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _spawn_by_forking() -> None:
    """Make multiprocessing's "spawn" fork a copy made now, as its "forkserver" does with a separate process."""
    listener, (alive, held) = socket.socket(socket.AF_UNIX), os.pipe()
    address = mp_connection.arbitrary_address("AF_UNIX")
    listener.bind(address)
    listener.listen()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        _copy(listener, alive)
    os.close(alive)
    listener.close()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, held, pid
    contexts: Any = context._concrete_contexts  # type: ignore[attr-defined]
    forking = type(contexts["forkserver"])()
    forking._name = "spawn"
    contexts["spawn"] = forking
    describe = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: {**describe(name), ENVIRONMENT: dict(os.environ)}


def _copy(listener: socket.socket, alive: int) -> NoReturn:
    """Fork for each spawn until the spawning process has ended. Signals that it gets as a parent are passed on."""
    prepare = spawn.prepare

    def prepare_environment(data: dict[str, Any]) -> None:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        environment = data.pop(ENVIRONMENT)
        os.environ.clear()
        os.environ.update(environment)
        prepare(data)

    spawn.prepare = prepare_environment
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))
    try:
        forkserver.main(listener.fileno(), alive, [])
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
