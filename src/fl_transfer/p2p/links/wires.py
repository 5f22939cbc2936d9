"""Wires from one engine's device to another's, which keep main memory out of the way.

A kind of wires is one library that can make them, and there is one for each type of device that has any.
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

from ..memory.moments import Moment
from ..options import SOURCE, Options, Transport
from .nccl import Nccl


class Wire(Protocol):
    """One way between two engines. One thread makes it, uses it and ends it.

    A call that fails has ended the wire. Its bytes are free for other use when a call has returned or failed.
    """

    def send(self, data: Tensor, after: Moment) -> None:
        """Send bytes that are there after a moment; return when they have gone."""

    def receive(self, data: Tensor, after: Moment) -> None:
        """Overwrite bytes that are unused after a moment; return when all have come."""

    def end(self) -> None:
        """Free the wire's resources; it may have ended already."""


class Kind(Protocol):
    """A library that makes wires."""

    name: str

    def ticket(self) -> bytes:
        """The bytes by which two engines find each other."""

    def open(self, ticket: bytes, rank: int, device: torch.device, given_up: Event) -> Wire:
        """The sender's end (rank 0) or the receiver's, when both are there.

        Once ``given_up`` is set this fails, and so do the wire's calls that wait for the other end.
        """


KINDS: dict[str, Callable[[], Kind]] = {"nccl": Nccl}
"""Backend of a device's collectives → the maker of its wires, if its library is there."""


@dataclass(frozen=True)
class Wiring:
    """The wires that an engine can make: their kind, the device, and the bytes of its memory that may wait."""

    kind: Kind
    device: torch.device
    capacity: int


def wiring(options: Options, device: torch.device, parts: int) -> tuple[Wiring | None, str]:
    """The wires that the user wants and the device has, or none and why; ``parts`` of an engine share its memory.

    Raises:
        ConfigError: the user insists on wires that there are not.
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
