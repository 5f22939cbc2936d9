"""Wires over gloo for engines on CPUs, in place of NCCL's, so that links can be tried without GPUs."""

from __future__ import annotations

from datetime import timedelta
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

WAITS = timedelta(seconds=3)
"""A wire that nobody serves ends after so long: gloo cannot be interrupted."""


class Gloo:
    """gloo; a ticket is the port of a store in the sender's process, on this machine."""

    name = "gloo"

    def __init__(self) -> None:
        self.stores: dict[bytes, TCPStore] = {}

    def ticket(self) -> bytes:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ticket = str(store.port).encode()
        self.stores[ticket] = store
        return ticket

    def open(self, ticket: bytes, rank: int, device: torch.device, given_up: Event) -> GlooWire:
        store = TCPStore("127.0.0.1", int(ticket)) if rank else self.stores[ticket]
        return GlooWire(ProcessGroupGloo(PrefixStore("wire", store), rank, 2, WAITS), rank)


class GlooWire:
    def __init__(self, group: Any, rank: int) -> None:
        self.group, self.peer = group, 1 - rank

    def send(self, data: Tensor, after: Any) -> None:
        self.group.send([data], self.peer, 0).wait(WAITS)

    def receive(self, data: Tensor, after: Any) -> None:
        self.group.recv([data], self.peer, 0).wait(WAITS)

    def end(self) -> None:
        """Nothing: a call that waits ends by itself, see :data:`WAITS`."""


def register_builtins(registry: Any) -> None:
    from fl_transfer.p2p.links.wires import KINDS

    KINDS["gloo"] = Gloo
