"""The sockets and threads between this engine's outbox and another's inbox.

One thread listens at this engine's address, stores arriving parts, and asks other engines for awaited transfers.
Another thread sends, one part at a time to each engine, so that a slow or dead engine does not delay others. A peer's
message is read within bounds, and answered or dropped with a log line; no message of a peer ends a thread.

A link joins the devices of two engines that can both make one (:mod:`..links`). Then a message only announces a part,
the receiver answers when its end is ready, and each end's link carries the bytes. A part without a link, or without
room on the receiver's device, is sent in the message.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from socket import socketpair
from threading import Event, Thread

import zmq

from fl_dispatch.logger_manager import get_logger

from ..links.link import Incoming, Outgoing, close
from ..links.wires import Wire
from ..protocol.messages import (
    AT_ONCE,
    HEADER_BYTES,
    BadMessage,
    Get,
    Go,
    Meet,
    Met,
    Put,
    State,
    Taken,
    Ticket,
    Void,
    frames,
    read,
    short,
)
from ..protocol.route import Address
from ..protocol.secret import OVERHEAD, Secret
from .inbox import Inbox
from .outbox import Outbox, Part

logger = get_logger(__name__)

SILENCE = 5.0
"""Seconds without an answer after which a peer counts as dead."""
TURN = 0.02
"""Seconds that a thread waits for work before it checks its timers."""
FLYING = 8
"""Parts in flight at a time, each to another engine. ZMQ holds a copy of them."""
PEERS = 128
"""Sockets to other engines per thread; the one unused longest is closed for another."""


@dataclass
class _Flight:
    """A part in flight.

    ``deadline`` is the time from which its engine counts as dead. ``link`` is the link for its bytes; ``asked`` says
    whether the link was asked to carry them.
    """

    part: Part
    deadline: float
    link: str = ""
    asked: bool = False


class Engine:
    """A worker's exchange, from the start until :meth:`close`.

    Args:
        address: the address at which it listens.
        inbox: the inbox, if the engine receives prompts.
        outbox: the outbox, if the engine sends prompts.
        secret: the secret of all engines.
        message_bytes: the largest number of data bytes in one message.
        silence: see :data:`SILENCE`.
        outgoing, incoming: links from device to device, if this engine supports them.

    Raises:
        OSError: another program listens at the address.
    """

    def __init__(
        self,
        address: Address,
        inbox: Inbox | None,
        outbox: Outbox | None,
        secret: Secret,
        message_bytes: int,
        silence: float = SILENCE,
        outgoing: Outgoing | None = None,
        incoming: Incoming | None = None,
    ) -> None:
        self.address = address
        self._inbox, self._outbox, self._secret, self._silence = inbox, outbox, secret, silence
        self._outgoing, self._incoming = outgoing, incoming
        self._limit = max(message_bytes, HEADER_BYTES) + OVERHEAD
        self._context = zmq.Context()
        self._stop = Event()
        self._peers: OrderedDict[Address, zmq.Socket[bytes]] = OrderedDict()
        self._asked: OrderedDict[Address, zmq.Socket[bytes]] = OrderedDict()
        self._flying: dict[Address, _Flight] = {}
        self._came: deque[tuple[bytes, Taken]] = deque()  # answers about parts that links have brought, with their peer
        self._bell, self._ring = socketpair()  # wakes the listening thread
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._quiet: dict[Address, float] = {}  # time until which a silent engine is not tried again
        self._listener = self._socket(zmq.ROUTER, address)
        secret.listen(self._listener, address)
        try:
            self._listener.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"P2P: cannot listen at {address}: {error}; choose another kv_port") from error
        self._threads = [Thread(target=self._run, args=(self._listen,), name="fl-p2p-listen", daemon=True)]
        if outbox is not None:
            self._threads.append(Thread(target=self._run, args=(self._send,), name="fl-p2p-send", daemon=True))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads and close the sockets; unsent parts are lost."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        close(link for links in (self._outgoing, self._incoming) if links is not None for link in links.all())
        self._context.destroy(linger=0)
        self._bell.close()
        self._ring.close()

    def _run(self, turn: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                turn()
            except Exception:  # logged: one bad message or peer must not end the thread
                logger.exception("P2P: an error at %s, which goes on", self.address)
                self._stop.wait(TURN)

    def _socket(self, kind: int, address: Address) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, int(":" in address.host))
        socket.set(zmq.MAXMSGSIZE, self._limit)
        socket.set(zmq.SNDHWM, 64)
        socket.set(zmq.RCVHWM, 4)
        return socket

    def _peer(
        self, peers: OrderedDict[Address, zmq.Socket[bytes]], address: Address, needed: Container[Address] = ()
    ) -> zmq.Socket[bytes]:
        """Return the socket to an engine. If there are too many, close another one that is not in ``needed``."""
        socket = peers.get(address)
        if socket is None:
            socket = self._socket(zmq.DEALER, address)
            self._secret.call(socket)
            try:
                socket.connect(f"tcp://{address}")
            except zmq.ZMQError:
                socket.close()
                raise
            for idle in [one for one in peers if one not in needed][: max(0, len(peers) + 1 - PEERS)]:
                peers.pop(idle).close()
            peers[address] = socket
        peers.move_to_end(address)
        return socket

    # -- the thread that listens --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        poller = zmq.Poller()
        for socket in (self._listener, *self._asked.values()):
            poller.register(socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        ready = dict(poller.poll(_ms(TURN)))
        if self._bell.fileno() in ready:
            self._bell.recv(4096)
        while self._came:
            who, taken = self._came.popleft()
            self._send_message(self._listener, taken, who)
        if self._listener in ready:
            self._handle_message()
        if self._incoming is not None:
            self._incoming.tend()
        for address, socket in self._asked.items():
            if socket in ready:
                self._handle_answer(address, socket)
        if self._inbox is not None:
            self._ask(self._inbox)

    def _ask(self, inbox: Inbox) -> None:
        for transfer, producer in inbox.questions():
            try:
                self._send_message(self._peer(self._asked, producer), Get(transfer))
            except Exception as error:  # logged: this transfer is lost, and the others are asked for
                inbox.answered(transfer, short(f"the engine at {producer} cannot be asked: {error}"))

    def _handle_message(self) -> None:
        who, *heard = self._listener.recv_multipart(zmq.NOBLOCK, copy=False)
        try:
            message, data = read([frame.buffer for frame in heard], Put, Get, Meet, Ticket, Void)
        except BadMessage as error:
            logger.warning("P2P: a message to %s is dropped: %s", self.address, error)
            return
        if isinstance(message, Void):
            if self._inbox is not None:
                for transfer in message.transfers:
                    self._inbox.take_back(transfer, message.why)
            return
        if isinstance(message, Meet | Ticket):
            answer: Met | Taken | Go | State = Met(message.name, short(self._meet(message)))
        elif isinstance(message, Put) and message.link:
            answer = self._await_part(message, who.bytes)
        elif isinstance(message, Put):
            refused = "this engine takes no prompts over" if self._inbox is None else self._inbox.put(message, data)
            answer = Taken(message.transfer, message.first, short(refused))
        else:
            gone = "this engine hands no prompts over" if self._outbox is None else self._outbox.asked(message.transfer)
            answer = State(message.transfer, short(gone))
        self._send_message(self._listener, answer, who.bytes)

    def _meet(self, message: Meet | Ticket) -> str:
        """Return why an engine has no link to this one; empty if it has."""
        if self._incoming is None:
            return "this engine takes keys and values in main memory"
        return self._incoming.welcome(message) if isinstance(message, Meet) else self._incoming.open(message)

    def _await_part(self, put: Put, who: bytes) -> Taken | Go:
        """Make a link receive a part; its thread answers when it has received it."""
        inbox, incoming = self._inbox, self._incoming
        link = incoming.link(put.link) if incoming is not None else None
        if inbox is None or incoming is None or link is None:
            return Taken(put.transfer, put.first, "that link is not here any more")
        piece, refused = inbox.room(put, put.count * inbox.block_bytes, incoming.pool)
        if piece is None:
            return Taken(put.transfer, put.first, short(refused)) if refused else Go(put.transfer, put.first, True)

        def came(broken: str) -> None:
            if broken:
                inbox.fail(put, piece, broken)
            why = broken or inbox.keep(put, piece, by_link=True)
            self._came.append((who, Taken(put.transfer, put.first, short(why))))
            with suppress(OSError):  # it has already been woken, or the engine is closing
                self._ring.send(b"!")

        link.post(lambda wire: wire.receive(piece.bytes, inbox.read), came)
        return Go(put.transfer, put.first)

    def _handle_answer(self, address: Address, socket: zmq.Socket[bytes]) -> None:
        assert self._inbox is not None
        try:
            state, _ = read(socket.recv_multipart(zmq.NOBLOCK), State)
        except BadMessage as error:
            logger.warning("P2P: an answer from %s is dropped: %s", address, error)
            return
        self._inbox.answered(state.transfer, state.gone)

    def _send_message(self, socket: zmq.Socket[bytes], message: Get | Met | Taken | Go | State, *to: bytes) -> None:
        try:
            socket.send_multipart([*to, *frames(message)], zmq.NOBLOCK)
        except zmq.Again:  # the peer reads nothing; the question is repeated, or given up
            logger.debug("P2P: %s gets no %s, because it reads nothing", to, type(message).__name__)

    # -- the thread that sends ----------------------------------------------------------------------------------------

    def _send(self) -> None:
        assert self._outbox is not None
        for (to, why), transfers in self._outbox.taken_back().items():
            while transfers and self._take_back(to, Void(transfers[:AT_ONCE], short(why))):
                del transfers[:AT_ONCE]
            if transfers:
                self._outbox.tell_later(to, why, transfers)
        part = None
        if len(self._flying) < FLYING:
            part = self._outbox.next(0 if self._flying else TURN, self._flying)
        if part is not None:
            self._send_off(self._outbox, part)
        if self._flying:
            self._land(self._outbox, 0 if part is not None else _ms(TURN))
        if self._outgoing is not None:
            self._outgoing.tend()

    def _send_off(self, outbox: Outbox, part: Part) -> None:
        now = time.monotonic()
        if self._quiet.get(part.to, now) > now:
            outbox.failed(part, "its engine did not answer a moment ago")
            return
        link = ""
        try:
            peer = self._peer(self._peers, part.to, self._flying)
            if self._outgoing is not None:
                if (meet := self._outgoing.meet(part.to)) is not None:
                    peer.send_multipart(frames(meet), zmq.NOBLOCK)
                link = self._outgoing.name(part.to) if part.on_device else ""
            self._announce(part, peer, link)
        except Exception as error:  # logged: its transfer ends
            outbox.failed(part, f"it cannot be sent to {part.to}: {error}")
            return
        self._flying[part.to] = _Flight(part, now + self._silence, link)

    def _take_back(self, to: Address, void: Void) -> bool:
        """Inform an engine, after all that it was sent, about wrong data; return whether its socket had room."""
        try:
            self._peer(self._peers, to, self._flying).send_multipart(frames(void), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except Exception as error:  # logged: that engine is dead or busy, and detects NaN itself
            logger.warning("P2P: %s does not learn that %s was wrong: %s", to, ", ".join(void.transfers), error)
        return True

    def _announce(self, part: Part, peer: zmq.Socket[bytes], link: str) -> None:
        """Send a part's message, with the data unless a link carries them."""
        put = Put(part.transfer, part.layout, part.first, part.count, part.total, link)
        peer.send_multipart(frames(put, b"" if link else part.in_main_memory().numpy().data), zmq.NOBLOCK)

    def _land(self, outbox: Outbox, wait: int) -> None:
        """Read the answers to parts in flight, and give up the parts for silent engines."""
        poller = zmq.Poller()
        for to in self._flying:
            poller.register(self._peers[to], zmq.POLLIN)
        ready = dict(poller.poll(wait))
        now = time.monotonic()
        for to, flight in list(self._flying.items()):
            if self._peers[to] in ready:
                self._handle_taken(outbox, flight)
            elif flight.deadline < now:
                self._peers.pop(to).close()
                if self._outgoing is not None:
                    self._outgoing.cut(to, "its engine does not answer")
                self._quiet = {one: until for one, until in self._quiet.items() if until > now}
                self._quiet[to] = now + self._silence
                self._crash(outbox, flight, f"the engine at {to} does not answer")

    def _handle_taken(self, outbox: Outbox, flight: _Flight) -> None:
        part, peer = flight.part, self._peers[flight.part.to]
        try:
            answer, _ = read(peer.recv_multipart(zmq.NOBLOCK), Taken, Go, Met)
        except BadMessage as error:
            logger.warning("P2P: an answer from %s is dropped: %s", part.to, error)
            return
        if isinstance(answer, Met):
            self._handle_met(part.to, peer, answer)
            return
        if (answer.transfer, answer.first) != (part.transfer, part.first):
            return  # a late answer
        if isinstance(answer, Go):
            self._carry(outbox, flight, peer, answer.by_message)
        elif answer.refused:
            self._crash(outbox, flight, answer.refused)
        else:
            del self._flying[part.to]
            outbox.sent(part, by_link=bool(flight.link))

    def _handle_met(self, to: Address, peer: zmq.Socket[bytes], answer: Met) -> None:
        if self._outgoing is None or (ticket := self._outgoing.met(to, answer.name, answer.refused)) is None:
            return
        try:
            peer.send_multipart(frames(ticket), zmq.NOBLOCK)
        except zmq.Again:
            self._outgoing.cut(to, "its engine reads nothing")

    def _carry(self, outbox: Outbox, flight: _Flight, peer: zmq.Socket[bytes], by_message: bool) -> None:
        """Send a part's bytes to the waiting receiver, by the link or in a message."""
        if flight.asked:
            return  # it was already asked
        part, flight.deadline = flight.part, time.monotonic() + self._silence
        if by_message and flight.link:
            flight.link = ""
            self._announce(part, peer, "")
            return
        link = self._outgoing.link(part.to) if self._outgoing is not None and flight.link else None
        if link is None:
            self._crash(outbox, flight, "its link is not here any more")
            return

        def send(wire: Wire) -> None:
            wire.send(part.piece.bytes, part.written)

        flight.asked = True
        outbox.lend(part)
        link.post(send, lambda broken: outbox.back(part))  # the receiver's answer tells the result

    def _crash(self, outbox: Outbox, flight: _Flight, why: str) -> None:
        """Give up a part that does not arrive, and cut the link that carried it, because its state is unknown."""
        del self._flying[flight.part.to]
        if self._outgoing is not None and flight.link:
            self._outgoing.cut(flight.part.to, why)
        outbox.failed(flight.part, why)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
