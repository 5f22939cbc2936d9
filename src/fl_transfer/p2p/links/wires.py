"""Wires from one engine's device to another's, which bypass main memory.

A kind of wire is one library that can make wires; each type of device has at most one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Protocol

import torch
from torch import Tensor

from fl_dispatch.devices import detect_device
from fl_dispatch.errors import ConfigError

from ..memory.stream_events import StreamEvent
from ..options import SOURCE, Options, Transport
from .nccl import Nccl


class Wire(Protocol):
    """One direction between two engines. One thread makes it, uses it and ends it.

    A failed call ends the wire. The bytes of a call are free once it has returned or failed.
    """

    def send(self, data: Tensor, after: StreamEvent) -> None:
        """Send bytes that are ready after a moment; return when they are sent."""

    def receive(self, data: Tensor, after: StreamEvent) -> None:
        """Overwrite bytes that are unused after a moment; return when all have arrived."""

    def end(self) -> None:
        """Free the wire's resources; it may have ended already."""


class Kind(Protocol):
    """A library that makes wires."""

    name: str

    def ticket(self) -> bytes:
        """Return the bytes by which two engines find each other."""

    def open(self, ticket: bytes, rank: int, device: torch.device, given_up: Event) -> Wire:
        """Return the sender's end (rank 0) or the receiver's, when both are ready.

        Once ``given_up`` is set this fails, and so do the wire's calls that wait for the other end.
        """


KINDS: dict[str, Callable[[], Kind]] = {"nccl": Nccl}
"""Backend of a device's collectives → the maker of its wires, if its library is installed."""


@dataclass(frozen=True)
class Wiring:
    """The wires that an engine can make: their kind, the device, and the bytes of its memory that may wait."""

    kind: Kind
    device: torch.device
    capacity: int


def wiring(options: Options, device: torch.device, parts: int) -> tuple[Wiring | None, str]:
    """Return the wires that the user wants and the device supports, or why none; ``parts`` share the memory.

    Raises:
        ConfigError: the user insists on wires that the device lacks.
    """
    if options.transport is Transport.HOST:
        return None, "the option transport says so"
    insists = options.transport is Transport.NCCL
    if options.secret_file is not None and not insists:
        return None, "a secret is set, and what goes from device to device is not encrypted"
    make, kind, why = (
        KINDS.get(detect_device().dist_backend),
        None,
        f"there is nothing like NCCL for the device {device.type}",
    )
    if make is not None:
        try:
            kind = make()
        except (OSError, RuntimeError, ValueError, AttributeError) as error:  # missing, broken, or too old
            why = f"its library cannot be used: {error}"
    if kind is not None and not (insists and kind.name != Transport.NCCL):
        return Wiring(kind, device, int(options.device_buffer_size) // parts), ""
    if insists:
        raise ConfigError(SOURCE, "transport", f"keys and values cannot travel over NCCL: {why}")
    return None, why
