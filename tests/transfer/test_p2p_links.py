"""Links of the P2P connector, with gloo in NCCL's place: what goes by them arrives, and what does not is not lost."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from p2p_linked import BLOCK, CPU, SOON, Gloo, Receiving, Sending, connect, eventually, pair, travel

from fl_dispatch.errors import ConfigError
from fl_transfer.p2p.links import link as links
from fl_transfer.p2p.links import wires
from fl_transfer.p2p.links.link import Incoming, Link, Outgoing
from fl_transfer.p2p.links.wires import Wiring, wiring
from fl_transfer.p2p.options import Options
from fl_transfer.p2p.protocol.messages import Meet, Ticket
from fl_transfer.p2p.protocol.route import Address

from gloo_wires import GlooWire  # isort: skip - its folder is known since the import above


@pytest.mark.parametrize("on_demand", [False, True], ids=["put", "get"])
def test_once_there_is_a_link_bytes_go_by_it(on_demand: bool) -> None:
    with pair(on_demand=on_demand) as two:
        connect(two)
        two.sender.tally.take()
        assert travel(two, "second")["received_direct_bytes"] == 3 * BLOCK
        assert travel(two, "third")["received_direct_bytes"] == 3 * BLOCK
        sent: Counter[str] = Counter()
        # the receiver has a part before its answer lets the sender count it
        assert eventually(lambda: sent.update(two.sender.tally.take()) or sent["sent_direct_bytes"] >= 6 * BLOCK)
        assert sent["sent_direct_bytes"] == 6 * BLOCK
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


def test_links_end_at_once_and_not_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CLOSING", 0.4)
    ever = Event()

    class Deaf(Stuck):
        def send(self, data: torch.Tensor, after: Any) -> None:
            ever.wait()

    several = [Link(Deaf, lambda: None, 60) for _ in range(5)]
    for link in several:
        link.post(lambda wire: wire.send(torch.empty(1), None), lambda broken: None)
    begun = time.monotonic()
    links.close(several)
    assert 0.7 < time.monotonic() - begun < 1.6, "twice, and not ten times"
    ever.set()


def test_a_link_that_ends_does_first_what_it_was_asked() -> None:
    heard: list[str] = []
    link = Link(Stuck, lambda: None, 60)
    link.post(lambda wire: time.sleep(0.2), heard.append)
    links.close([link])
    assert heard == [""]
    link.post(lambda wire: None, heard.append)
    assert heard == ["", links.CUT]


# -- whom an engine asks, and whom it answers -------------------------------------------------------------------------

TO = Address("127.0.0.1", 9)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=lambda: self.now))


class Hanging:
    """Wires whose other end never comes, until they are given up; with ``come`` it has come."""

    name = "hanging"

    def __init__(self, come: bool = False) -> None:
        self.tickets, self.come = 0, come

    def ticket(self) -> bytes:
        self.tickets += 1
        return b"ticket"

    def open(self, ticket: bytes, rank: int, device: torch.device, given_up: Event) -> Stuck:
        if not self.come:
            given_up.wait()
        return Stuck(given_up)


def test_whoever_refuses_is_asked_ever_more_rarely_and_no_ticket_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kind = Clock(monkeypatch), Hanging()
    outgoing = Outgoing(Wiring(kind, CPU, BLOCK), TO, 1)
    waits = []
    for _ in range(9):
        meet = outgoing.meet(TO)
        assert meet is not None
        assert outgoing.met(TO, meet.name, "no") is None
        begun = clock.now
        while outgoing.meet(TO) is None:
            clock.now += 10
        waits.append(clock.now - begun)
        outgoing._asked.clear()
    assert waits == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert kind.tickets == 0


def test_a_link_that_was_there_is_tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kind = Clock(monkeypatch), Hanging()
    outgoing = Outgoing(Wiring(kind, CPU, BLOCK), TO, 1)
    for come, again in ((False, 30), (False, 60), (True, 30)):
        kind.come = come
        meet = outgoing.meet(TO)
        assert meet is not None
        assert outgoing.met(TO, meet.name, "") == Ticket(meet.name, b"ticket")
        assert not come or eventually(lambda: outgoing.link(TO))
        outgoing.cut(TO, "it broke")
        clock.now += again - 1
        assert outgoing.meet(TO) is None
        clock.now += 2
    assert kind.tickets == 3, "one for each link, none for two"


def test_a_question_that_nobody_answers_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    outgoing = Outgoing(Wiring(Hanging(), CPU, BLOCK), TO, 1)
    lost = outgoing.meet(TO)
    assert lost is not None
    assert outgoing.meet(TO) is None
    clock.now += links.OPENING + 1
    again = outgoing.meet(TO)
    assert again is not None
    assert outgoing.met(TO, lost.name, "") is None, "its answer is late"
    assert outgoing.met(TO, again.name, "") is not None
    links.close(outgoing.all())


def test_an_engine_that_is_still_starting_refuses_links() -> None:
    with pair() as two:
        two.receiver.links.ready = False
        assert "received_direct_bytes" not in travel(two, "first")
        assert "received_direct_bytes" not in travel(two, "second")
        assert two.receiver.links.pool is None, "no memory of its device is taken"


def test_strangers_who_never_come_are_bounded_and_cut_no_link_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LINKS", 2)
    kind = Hanging(come=True)
    incoming = Incoming(Wiring(kind, CPU, BLOCK), 60)
    incoming.ready = True
    before = set(threading.enumerate())

    def at_work() -> int:
        return sum(thread.name == "fl-p2p-link" for thread in set(threading.enumerate()) - before)

    def ask(name: str, sender: str) -> str:
        return incoming.welcome(Meet(name, kind.name, sender)) or incoming.open(Ticket(name, b"ticket"))

    def opened(name: str) -> bool:
        incoming.tend()
        return not incoming._links[name].new

    for name in ("friend", "other"):
        assert ask(name, name) == ""
        assert eventually(lambda name=name: opened(name))
    kind.come = False
    answers = [ask(str(number), "friend") for number in range(100)]
    assert answers == [""] * links.OPENINGS + [f"this engine opens {links.OPENINGS} other links now"] * 96
    assert "does not expect" in incoming.open(Ticket("another", b"ticket"))
    for number in range(100):
        incoming._expected[f"old {number}"] = "friend"
    incoming.tend()
    assert incoming.link("friend") is not None
    assert incoming.link("other") is not None
    assert at_work() == 2 + links.OPENINGS

    clock = Clock(monkeypatch)
    clock.now = time.monotonic() + links.OPENING + 1
    incoming.tend()
    assert set(incoming._links) == {"friend", "other"}
    assert eventually(lambda: at_work() == 2)
    links.close(incoming.all())


def test_a_stranger_who_asks_by_one_name_or_for_links_that_cannot_end_gets_no_more_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released, kind = Event(), SimpleNamespace(name="slow", ticket=lambda: b"", open=lambda *_: released.wait())
    incoming = Incoming(Wiring(kind, CPU, BLOCK), 60)
    incoming.ready = True
    before = set(threading.enumerate())

    def ask(name: str) -> str:
        return incoming.welcome(Meet(name, kind.name, "stranger")) or incoming.open(Ticket(name, b"ticket"))

    assert [ask("one"), ask("one")] == ["", "this engine has a link of that name"]
    clock = Clock(monkeypatch)
    for turn in range(4):
        for number in range(10):
            ask(f"{turn} {number}")
        clock.now = time.monotonic() + links.OPENING + 1
        incoming.tend()
    assert sum(thread.name == "fl-p2p-link" for thread in set(threading.enumerate()) - before) <= links.OPENINGS
    released.set()
    links.close(incoming.all())
    assert all(link.ended for link in incoming.all())


class Slow(GlooWire):
    """A wire whose device still reads a while after the link was given up."""

    slow, let_go = Event(), Event()

    def send(self, data: torch.Tensor, after: Any) -> None:
        if self.slow.is_set():
            self.let_go.wait()
            raise RuntimeError("it was given up")
        super().send(data, after)


class SlowGloo(Gloo):
    def open(self, ticket: bytes, rank: int, device: torch.device, given_up: Event) -> Slow:
        wire = super().open(ticket, rank, device, given_up)
        wire.__class__ = Slow
        return wire  # type: ignore[return-value]


def test_memory_that_a_device_still_reads_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "slow", Event())
    monkeypatch.setattr(Slow, "let_go", Event())
    with pair(SlowGloo(), silence=0.5) as two:
        connect(two)
        Slow.slow.set()
        two.sender.send("lost", two.receiver.engine.address, 1)
        assert eventually(lambda: "does not answer" in two.sender.box.asked("lost"))
        assert two.sender.links._pool.taken == BLOCK
        Slow.let_go.set()
        assert eventually(lambda: two.sender.links._pool.taken == 0)


def test_a_receiver_that_says_twice_that_it_is_ready_gets_the_bytes_once() -> None:
    with pair() as two:
        connect(two)
        await_part, engine = two.receiver.engine._await_part, two.receiver.engine

        def twice(put: Any, who: bytes) -> Any:
            answer = await_part(put, who)
            engine._send_message(engine._listener, answer, who)
            return answer

        engine._await_part = twice
        assert travel(two, "second")["received_direct_bytes"] == 3 * BLOCK
        assert travel(two, "third")["received_direct_bytes"] == 3 * BLOCK


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
