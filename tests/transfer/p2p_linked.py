"""Two engines with links in one process, without vLLM: what tests of links send from one to the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fl_transfer.p2p.counts import Tally
from fl_transfer.p2p.engine.exchange import Engine
from fl_transfer.p2p.engine.inbox import Inbox
from fl_transfer.p2p.engine.outbox import Outbox
from fl_transfer.p2p.links.link import Incoming, Outgoing
from fl_transfer.p2p.links.wires import Wiring
from fl_transfer.p2p.memory.pool import BuddyPool
from fl_transfer.p2p.protocol.route import Address
from fl_transfer.p2p.protocol.secret import Secret
from processes import free_port

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm/plugins"))

from gloo_wires import Gloo

CPU = torch.device("cpu")
LAYOUT = bytes(16)
BLOCK = 4096
"""Bytes of a block, and of a part."""
SOON = 10.0


def eventually(happens: Callable[[], Any], within: float = SOON) -> Any:
    deadline = time.monotonic() + within
    while not (found := happens()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


class Sending:
    """An engine that sends."""

    def __init__(self, kind: Any, capacity: int, silence: float, port: int = 0, on_demand: bool = False) -> None:
        address = Address("127.0.0.1", port or free_port())
        self.tally = Tally()
        self.links = Outgoing(Wiring(kind, CPU, capacity), address, silence)
        self.box = Outbox(BuddyPool(64 * BLOCK), LAYOUT, on_demand, 60, self.tally, self.links.pool)
        self.engine = Engine(address, None, self.box, Secret(), BLOCK, silence, self.links)

    def send(self, transfer: str, to: Address, blocks: int = 3) -> None:
        for first in range(blocks):
            self.box.add(transfer, to, first, 1, blocks, BLOCK, lambda into, value=first: into.fill_(value + 1))

    def taken(self) -> int:
        return self.box._pool.taken + (self.links._pool.taken if self.links._pool is not None else 0)


class Receiving:
    """An engine that receives; without a kind of wires it has main memory only."""

    def __init__(self, kind: Any, capacity: int, silence: float) -> None:
        self.tally = Tally()
        self.box = Inbox(BuddyPool(64 * BLOCK), LAYOUT, BLOCK, 60, silence, self.tally)
        self.links = Incoming(Wiring(kind, CPU, capacity), silence) if kind is not None else None
        if self.links is not None:
            self.links.ready = True
        address = Address("127.0.0.1", free_port())
        self.engine = Engine(address, self.box, None, Secret(), BLOCK, silence, None, self.links)

    def outcome(self, transfer: str) -> str:
        """Whatever has become of a transfer: nothing if it is here."""
        told: dict[str, str] = {}

        def known() -> bool:
            ready, lost = self.box.outcomes()
            told.update(dict.fromkeys(ready, ""), **lost)
            return transfer in told

        assert eventually(known)
        return told[transfer]

    def load(self, transfer: str) -> list[int]:
        got: list[int] = []
        self.box.load(transfer, lambda first, count, data: got.extend(data.unique().tolist()))
        return got

    def taken(self) -> int:
        device = self.links.pool if self.links is not None else None
        return self.box._pool.taken + (device.taken if device is not None else 0)


@contextmanager
def pair(
    sends: Any = None,
    receives: Any = None,
    silence: float = SOON,
    room: int = 64,
    on_demand: bool = False,
    **sending: Any,
) -> Iterator[Any]:
    """Two engines whose devices have so many blocks of room."""
    sender = Sending(sends or Gloo(), 64 * BLOCK, silence, on_demand=on_demand, **sending)
    two = SimpleNamespace(sender=sender, receiver=Receiving(receives or Gloo(), room * BLOCK, silence))
    try:
        yield two
    finally:
        two.sender.engine.close()
        two.receiver.engine.close()


def travel(two: Any, transfer: str, blocks: int = 3) -> dict[str, int]:
    """Have a prompt travel, and compare it; the counts of the receiver."""
    two.receiver.tally.take()
    two.sender.send(transfer, two.receiver.engine.address, blocks)
    two.receiver.box.await_(transfer, two.sender.engine.address, blocks)
    assert two.receiver.outcome(transfer) == ""
    assert two.receiver.load(transfer) == list(range(1, blocks + 1))
    return two.receiver.tally.take()


def connect(two: Any, transfer: str = "first") -> None:
    """Have a prompt travel in main memory while a link is made, and wait for the link."""
    assert "received_direct_bytes" not in travel(two, transfer)
    assert eventually(lambda: two.sender.links.link(two.receiver.engine.address))
