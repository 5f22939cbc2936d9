"""Wires over NCCL: a communicator of two ranks, on a stream of its own.

NCCL's functions are called through vLLM's own table of them. PyTorch's process groups would not do: their watchdog ends
the whole process when a peer has died.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .wires import Moment


class Nccl:
    """NCCL, as vLLM loads it.

    Raises:
        OSError: there is no library.
    """

    name = "nccl"

    def __init__(self) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._library: Any = NCCLLibrary()

    def ticket(self) -> bytes:
        """NCCL's unique id."""
        return bytes(self._library.ncclGetUniqueId().internal)

    def open(self, ticket: bytes, rank: int, device: torch.device) -> NcclWire:
        """One end of a new communicator."""
        return NcclWire(self._library, ticket, rank, device)


class NcclWire:
    """One end. Its first byte has gone when it is there, because NCCL connects two ranks when they first talk."""

    def __init__(self, library: Any, ticket: bytes, rank: int, device: torch.device) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import buffer_type, cudaStream_t, ncclDataTypeEnum

        self._library, self._peer, self._cut = library, 1 - rank, False
        self._pointer, self._byte = buffer_type, ncclDataTypeEnum.from_torch(torch.uint8)
        torch.cuda.set_device(device)  # of this thread, which is the wire's
        self._stream = torch.cuda.Stream(device)
        self._handle = cudaStream_t(self._stream.cuda_stream)
        self._end = torch.cuda.Event(blocking=True)
        self._communicator = library.ncclCommInitRank(2, library.unique_id_from_bytes(ticket), rank)
        with torch.cuda.stream(self._stream):
            first = torch.zeros(1, dtype=torch.uint8, device=device)
        (self.send if rank == 0 else self.receive)(first, None)

    def send(self, data: Tensor, after: Moment) -> None:
        """See :class:`.wires.Wire`."""
        self._run(self._library.ncclSend, data, after)

    def receive(self, data: Tensor, after: Moment) -> None:
        """See :class:`.wires.Wire`."""
        self._run(self._library.ncclRecv, data, after)

    def cut(self) -> None:
        """See :class:`.wires.Wire`. It may wait for NCCL."""
        self._cut = True
        self._library.ncclCommAbort(self._communicator)

    def _run(self, call: Any, data: Tensor, after: Moment) -> None:
        if after is not None:
            self._stream.wait_event(after)
        call(self._pointer(data.data_ptr()), data.numel(), self._byte, self._peer, self._communicator, self._handle)
        self._end.record(self._stream)
        self._end.synchronize()
        if self._cut:
            raise RuntimeError("it was cut")
