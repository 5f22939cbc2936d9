"""NCCL's functions for wires, and a communicator of two ranks that never waits for the other rank.

NCCL's manual calls such a communicator non-blocking. Each call starts an operation, and the communicator's state is "in
progress" until it is done; it may be aborted meanwhile. A send is in its stream once the state changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Event
from typing import Any

DONE = 0
"""NCCL's result (``ncclResult_t``) of a successful call."""
IN_PROGRESS = 7
"""NCCL's result of a call in progress; all other results are errors."""
BYTE = 1
"""NCCL's name of the data type (``ncclUint8``)."""
PAUSES = 20e-6, 1e-3
"""Seconds between two checks of a state: the first pause, doubled each time up to the last."""


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
        path: the path of the shared library.

    Raises:
        OSError: the library is missing.
        AttributeError: the library is too old, and lacks a function.
    """

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._calls: dict[str, Any] = {}
        for name, arguments in _ARGUMENTS.items():
            call = self._calls[name] = getattr(library, name)
            call.argtypes, call.restype = arguments, ctypes.c_int
        self._calls["ncclGetErrorString"].restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> int:
        """Return the result of one of NCCL's functions."""
        result: int = self._calls[name](*arguments)
        return result

    def error(self, result: int) -> str:
        """Return the meaning of a result."""
        return f"NCCL: {self._calls['ncclGetErrorString'](result).decode()}"

    def ticket(self) -> bytes:
        """Return a new unique id. An NCCL thread waits until both ranks have used it.

        Raises:
            RuntimeError: NCCL has no network.
        """
        made = _Id()
        result = self.call("ncclGetUniqueId", ctypes.byref(made))
        if result != DONE:
            raise RuntimeError(self.error(result))
        return ctypes.string_at(ctypes.byref(made), ctypes.sizeof(made))


class Communicator:
    """One of two ranks. Only the thread that makes it calls NCCL for it, also to abort it.

    Args:
        library: NCCL.
        ticket: the ticket of both ranks.
        rank: 0 or 1.
        given_up: ends every wait once it is set.

    Raises:
        RuntimeError: NCCL failed, or the communicator was given up; every method that raises aborts it.
    """

    def __init__(self, library: Library, ticket: bytes, rank: int, given_up: Event) -> None:
        self._library, self._peer, self._given_up = library, 1 - rank, given_up
        self._handle = ctypes.c_void_p()
        id_ = _Id.from_buffer_copy(ticket.ljust(ctypes.sizeof(_Id), b"\0")[: ctypes.sizeof(_Id)])
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0, -(1 << 31))
        begun = library.call("ncclCommInitRankConfig", ctypes.byref(self._handle), 2, id_, rank, ctypes.byref(config))
        self._go_on(begun)

    def send(self, pointer: int, size: int, stream: int) -> None:
        """Queue the sending of bytes on a stream."""
        self._go_on(self._library.call("ncclSend", pointer, size, BYTE, self._peer, self._handle, stream))

    def receive(self, pointer: int, size: int, stream: int) -> None:
        """Queue the reception of bytes on a stream."""
        self._go_on(self._library.call("ncclRecv", pointer, size, BYTE, self._peer, self._handle, stream))

    def wait(self, over: Callable[[], bool]) -> None:
        """Return once ``over`` returns true."""
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
        """Wait until a started operation is in its stream, or the communicator is ready."""
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
