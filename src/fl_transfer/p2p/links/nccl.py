"""Wires over NCCL: a communicator of two ranks, on a separate stream.

PyTorch's process groups are unsuitable, because their watchdog ends the whole process when a peer has died.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import torch
from torch import Tensor

from ..memory.stream_events import StreamEvent
from .nccl_library import Communicator, Library


class Nccl:
    """NCCL, found where vLLM looks for it.

    Raises:
        OSError, ValueError, AttributeError: the library is missing or too old.
    """

    name = "nccl"

    def __init__(self) -> None:
        from vllm.utils.nccl import find_nccl_library

        self._library = Library(find_nccl_library())

    def ticket(self) -> bytes:
        """Return NCCL's unique id."""
        return self._library.ticket()

    def open(self, ticket: bytes, rank: int, device: torch.device, given_up: Event) -> NcclWire:
        """Open one end of a new communicator."""
        torch.cuda.set_device(device)  # the wire's thread runs this
        communicator = Communicator(self._library, ticket, rank, given_up)
        try:
            return NcclWire(communicator, rank, device)
        except RuntimeError:  # for example out of memory
            communicator.abort()
            raise


class NcclWire:
    """One end, made after its first byte was sent, because NCCL connects two ranks when they first communicate."""

    def __init__(self, communicator: Communicator, rank: int, device: torch.device) -> None:
        self._communicator = communicator
        self._stream = torch.cuda.Stream(device)
        self._end = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            first = torch.zeros(1, dtype=torch.uint8, device=device)
        (self.send if rank == 0 else self.receive)(first, None)

    def send(self, data: Tensor, after: StreamEvent) -> None:
        """See :class:`.wires.Wire`."""
        self._run(self._communicator.send, data, after)

    def receive(self, data: Tensor, after: StreamEvent) -> None:
        """See :class:`.wires.Wire`."""
        self._run(self._communicator.receive, data, after)

    def end(self) -> None:
        """See :class:`.wires.Wire`. It may wait for NCCL."""
        self._communicator.abort()
        self._stream.synchronize()

    def _run(self, put: Callable[[int, int, int], None], data: Tensor, after: StreamEvent) -> None:
        if after is not None:
            self._stream.wait_event(after)
        try:
            put(data.data_ptr(), data.numel(), self._stream.cuda_stream)
            self._end.record(self._stream)
            self._communicator.wait(self._end.query)
        except RuntimeError:
            self.end()  # from now on the device does not touch these bytes
            raise
