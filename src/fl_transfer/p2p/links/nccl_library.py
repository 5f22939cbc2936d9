"""NCCL's functions for wires, and a communicator of two ranks that never waits for the other rank.

NCCL's manual calls such a communicator non-blocking. Each call begins something, and the communicator's state is "in
progress" until that is done; it may be aborted meanwhile. A send is in its stream once the state is another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Event
from typing import Any

DONE = 0
"""NCCL's result (``ncclResult_t``) of a call that has succeeded."""
IN_PROGRESS = 7
"""NCCL's result of a call that goes on; all other results are errors."""
BYTE = 1
"""NCCL's name of the data type (``ncclUint8``)."""
PAUSES = 20e-6, 1e-3
"""Seconds between two looks at a state: the first ones, and each later one is twice as long, up to the last."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class _Config(ctypes.Structure):
    """The beginning of ``ncclConfig_t``; NCCL takes defaults for fields beyond ``size``."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
    )


_STATE = ctypes.POINTER(ctypes.c_int)
_TRANSFER = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (ctypes.POINTER(_Id),),
    "ncclCommInitRankConfig": (
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        _Id,
        ctypes.c_int,
        ctypes.POINTER(_Config),
    ),
    "ncclCommGetAsyncError": (ctypes.c_void_p, _STATE),
    "ncclCommAbort": (ctypes.c_void_p,),
    "ncclSend": _TRANSFER,
    "ncclRecv": _TRANSFER,
    "ncclGetErrorString": (ctypes.c_int,),
}


class Library:
    """NCCL.

    Args:
        path: of the shared library.

    Raises:
        OSError: it is not there.
        AttributeError: it is too old, and lacks a function.
    """

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._calls: dict[str, Any] = {}
        for name, arguments in _ARGUMENTS.items():
            call = self._calls[name] = getattr(library, name)
            call.argtypes, call.restype = arguments, ctypes.c_int
        self._calls["ncclGetErrorString"].restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> int:
        """The result of one of NCCL's functions."""
        result: int = self._calls[name](*arguments)
        return result

    def error(self, result: int) -> str:
        """The meaning of a result."""
        return f"NCCL: {self._calls['ncclGetErrorString'](result).decode()}"

    def ticket(self) -> bytes:
        """A new unique id. A thread of NCCL's waits until both ranks have used it.

        Raises:
            RuntimeError: NCCL has no network.
        """
        made = _Id()
        result = self.call("ncclGetUniqueId", ctypes.byref(made))
        if result != DONE:
            raise RuntimeError(self.error(result))
        return ctypes.string_at(ctypes.byref(made), ctypes.sizeof(made))


class Communicator:
    """One of two ranks. The thread that makes it is the only one that calls NCCL about it, also to abort it.

    Args:
        library: NCCL.
        ticket: of both ranks.
        rank: 0 or 1.
        given_up: once set, it ends every wait.

    Raises:
        RuntimeError: NCCL failed, or it was given up; then it is aborted, as by every method that raises.
    """

    def __init__(self, library: Library, ticket: bytes, rank: int, given_up: Event) -> None:
        self._library, self._peer, self._given_up = library, 1 - rank, given_up
        self._handle = ctypes.c_void_p()
        id_ = _Id.from_buffer_copy(ticket.ljust(ctypes.sizeof(_Id), b"\0")[: ctypes.sizeof(_Id)])
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0, -(1 << 31))
        begun = library.call("ncclCommInitRankConfig", ctypes.byref(self._handle), 2, id_, rank, ctypes.byref(config))
        self._go_on(begun)

    def send(self, pointer: int, size: int, stream: int) -> None:
        """Put the sending of bytes into a stream."""
        self._go_on(self._library.call("ncclSend", pointer, size, BYTE, self._peer, self._handle, stream))

    def receive(self, pointer: int, size: int, stream: int) -> None:
        """Put the reception of bytes into a stream."""
        self._go_on(self._library.call("ncclRecv", pointer, size, BYTE, self._peer, self._handle, stream))

    def wait(self, over: Callable[[], bool]) -> None:
        """Return once that is so."""
        pause, longest = PAUSES
        while (state := self._state()) == IN_PROGRESS or (state == DONE and not over()):
            if self._given_up.wait(pause):
                self.abort()
                raise RuntimeError("it was given up")
            pause = min(2 * pause, longest)
        self._check(state)

    def abort(self) -> None:
        """End the communicator and its work in streams; NCCL frees its resources, and may wait for its own threads."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            self._library.call("ncclCommAbort", handle)

    def _go_on(self, begun: int) -> None:
        """Something has begun: wait until it is in its stream, or the communicator ready."""
        if begun != IN_PROGRESS:
            self._check(begun)
        self.wait(lambda: True)

    def _state(self) -> int:
        state = ctypes.c_int()
        result = self._library.call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
        return result or state.value

    def _check(self, result: int) -> None:
        if result != DONE:
            self.abort()
            raise RuntimeError(self._library.error(result))
