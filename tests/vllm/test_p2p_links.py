"""Links of the P2P connector, with gloo in NCCL's place: what goes by them arrives, and what does not is not lost."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_dispatch.errors import ConfigError
from processes import free_port
from vllm_fl.p2p import links, wires
from vllm_fl.p2p.counts import Tally
from vllm_fl.p2p.engine import Engine
from vllm_fl.p2p.inbox import Inbox
from vllm_fl.p2p.links import Incoming, Link, Outgoing
from vllm_fl.p2p.options import Options
from vllm_fl.p2p.outbox import Outbox
from vllm_fl.p2p.pool import BuddyPool
from vllm_fl.p2p.route import Address
from vllm_fl.p2p.secret import Secret
from vllm_fl.p2p.wires import Wiring, wiring

sys.path.insert(0, str(Path(__file__).parent / "plugins"))

from gloo_wires import Gloo, GlooWire

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
    receiver = Receiving(receives or Gloo(), room * BLOCK, silence)
    try:
        yield SimpleNamespace(sender=sender, receiver=receiver)
    finally:
        sender.engine.close()
        receiver.engine.close()


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


@pytest.mark.parametrize("on_demand", [False, True], ids=["put", "get"])
def test_once_there_is_a_link_bytes_go_by_it(on_demand: bool) -> None:
    with pair(on_demand=on_demand) as two:
        connect(two)
        two.sender.tally.take()
        assert travel(two, "second")["received_direct_bytes"] == 3 * BLOCK
        assert travel(two, "third")["received_direct_bytes"] == 3 * BLOCK
        assert two.sender.tally.take()["sent_direct_bytes"] == 6 * BLOCK
        assert eventually(lambda: two.sender.taken() == two.receiver.taken() == 0)


def test_parts_for_which_the_device_has_no_room_come_in_messages() -> None:
    with pair(room=2) as two:
        connect(two)
        counts = travel(two, "second")
        assert counts["received_bytes"] == 3 * BLOCK
        assert counts["received_direct_bytes"] == 2 * BLOCK
        assert eventually(lambda: two.sender.taken() == two.receiver.taken() == 0)


@pytest.mark.parametrize("other", [None, "another"])
def test_an_engine_without_the_same_wires_gets_messages(other: str | None, caplog: pytest.LogCaptureFixture) -> None:
    kind = Gloo()
    kind.name = other or kind.name
    with pair(receives=kind) as two:
        if other is None:
            two.receiver.engine._incoming = None
        with caplog.at_level(logging.WARNING):
            assert "received_direct_bytes" not in travel(two, "first")
            assert "received_direct_bytes" not in travel(two, "second")
        said = "our" if other else "takes keys and values in main memory"
        assert [said in record.getMessage() for record in caplog.records] == [True], "once"
        assert "through main memory" in caplog.text


class Deaf(GlooWire):
    """A wire whose end does nothing from now on, as that of a process that was killed."""

    dead = Event()

    def send(self, data: torch.Tensor, after: Any) -> None:
        if self.dead.is_set():
            time.sleep(0.2)
            raise RuntimeError("it is dead")
        super().send(data, after)

    def receive(self, data: torch.Tensor, after: Any) -> None:
        if self.dead.is_set():
            raise RuntimeError("it is dead")
        super().receive(data, after)


class DeafGloo(Gloo):
    def open(self, ticket: bytes, rank: int, device: torch.device, given_up: Event) -> Deaf:
        wire = super().open(ticket, rank, device, given_up)
        wire.__class__ = Deaf
        return wire  # type: ignore[return-value]


@pytest.mark.parametrize("which", ["sends", "receives"])
def test_a_link_whose_end_is_dead_loses_one_transfer_and_then_messages_carry(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deaf, "dead", Event())
    with pair(silence=0.5, **{which: DeafGloo()}) as two:
        connect(two)
        Deaf.dead.set()
        two.sender.send("lost", two.receiver.engine.address)
        two.receiver.box.await_("lost", two.sender.engine.address, 3)
        assert two.receiver.outcome("lost") != ""
        assert eventually(lambda: two.sender.box.asked("lost") != "")
        time.sleep(0.6)  # the sender may have taken the receiver for dead
        assert "received_direct_bytes" not in travel(two, "after")
        assert eventually(lambda: two.sender.taken() == two.receiver.taken() == 0), "memory comes back"


def test_an_engine_that_starts_again_gets_a_new_link(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as two:
        connect(two)
        port = two.sender.engine.address.port
        two.sender.engine.close()
        (name,) = two.receiver.links._links
        two.sender = Sending(Gloo(), 64 * BLOCK, SOON, port)
        assert "received_direct_bytes" not in travel(two, "again")
        assert eventually(lambda: two.sender.links.link(two.receiver.engine.address))
        assert travel(two, "more")["received_direct_bytes"] == 3 * BLOCK
        assert eventually(lambda: name not in two.receiver.links._links), "its old link was cut"


def test_a_receiver_that_forgot_the_link_loses_one_transfer() -> None:
    with pair() as two:
        connect(two)
        two.receiver.links._links.clear()
        two.sender.send("lost", two.receiver.engine.address)
        two.receiver.box.await_("lost", two.sender.engine.address, 3)
        assert "link is not here any more" in two.receiver.outcome("lost")
        assert "received_direct_bytes" not in travel(two, "after")


def test_links_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LINKS", 1)
    receivers = [Receiving(Gloo(), 64 * BLOCK, SOON) for _ in range(3)]
    sender = Sending(Gloo(), 64 * BLOCK, SOON)
    try:
        for number, receiver in enumerate(receivers):
            connect(SimpleNamespace(sender=sender, receiver=receiver), str(number))
            assert len(sender.links._links) == 1
    finally:
        for one in (sender, *receivers):
            one.engine.close()


# -- a link by itself -------------------------------------------------------------------------------------------------


class Stuck:
    """A wire that waits until it is given up."""

    def __init__(self, given_up: Event) -> None:
        self.given_up, self.ended = given_up, Event()

    def send(self, data: torch.Tensor, after: Any) -> None:
        self.given_up.wait()
        raise RuntimeError("it was given up")

    receive = send

    def end(self) -> None:
        self.ended.set()


def test_a_use_that_takes_too_long_is_cut_and_later_ones_fail_at_once() -> None:
    heard: list[str] = []
    link = Link(Stuck, lambda: None, 0.05)
    assert eventually(lambda: link.open)
    link.post(lambda wire: wire.send(torch.empty(1), None), heard.append)
    link.post(lambda wire: wire.send(torch.empty(1), None), heard.append)
    time.sleep(0.1)
    link.tend()
    assert eventually(lambda: len(heard) == 2)
    link.post(lambda wire: wire.send(torch.empty(1), None), heard.append)
    assert heard == ["its other end did nothing for 0.05 s"] * 3


def test_a_wire_that_cannot_be_made_or_comes_too_late_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(given_up: Event) -> Any:
        raise OSError("no library")

    link = Link(fail, lambda: None, 1)
    assert eventually(lambda: link.broken) == "it could not be made: no library"

    monkeypatch.setattr(links, "OPENING", 0.05)
    come, wire = Event(), Stuck(Event())

    def late(given_up: Event) -> Any:
        come.wait()
        return wire

    link = Link(late, lambda: None, 1)
    time.sleep(0.1)
    link.tend()
    assert "did nothing for 0.05 s" in link.broken
    come.set()
    assert eventually(wire.ended.is_set), "it ends, because nobody uses it"


# -- the choice -------------------------------------------------------------------------------------------------------


def test_the_choice_of_wires_says_why_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert wiring(Options(transport="auto"), CPU, 1) == (None, "there is nothing like NCCL for the device cpu")
    monkeypatch.setitem(wires.KINDS, "gloo", Gloo)
    chosen, why = wiring(Options(transport="auto", device_buffer_size=10), CPU, 2)
    assert chosen is not None
    assert (chosen.kind.name, chosen.capacity, why) == ("gloo", 5, "")
    assert wiring(Options(transport="host"), CPU, 1) == (None, "the option transport says so")
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    assert "not encrypted" in wiring(Options(transport="auto", secret_file=secret), CPU, 1)[1]

    def fail() -> Any:
        raise OSError("libnccl.so.2 is missing")

    monkeypatch.setitem(wires.KINDS, "gloo", fail)
    assert wiring(Options(transport="auto"), CPU, 1) == (None, "its library cannot be used: libnccl.so.2 is missing")
    with pytest.raises(ConfigError, match=r"transport: keys and values cannot travel over NCCL: .*libnccl"):
        wiring(Options(transport="nccl"), CPU, 1)
