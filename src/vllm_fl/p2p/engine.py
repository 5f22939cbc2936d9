"""The sockets and threads between an outbox here and an inbox there.

One thread listens at this engine's address, keeps what arrives, and asks other engines for what is awaited. Another one
sends what leaves: one part at a time to each engine, so that one that is slow or dead holds nobody else up. A peer's
message is read within bounds, and answered or dropped with a log line; nothing that a peer sends ends a thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container
from threading import Event, Thread

import zmq

from fl_dispatch.logger_manager import get_logger

from .inbox import Inbox
from .messages import HEADER_BYTES, BadMessage, Get, Put, State, Taken, frames, read, short
from .outbox import Outbox, Part
from .route import Address
from .secret import OVERHEAD, Secret

logger = get_logger(__name__)

SILENCE = 5.0
"""Seconds after which a peer that answers nothing is taken for dead."""
TURN = 0.02
"""Seconds that a thread waits for something to do before it looks at its clocks."""
FLYING = 8
"""Parts on their way at a time, each to another engine. ZMQ holds a copy of them."""
PEERS = 128
"""Sockets to other engines, of each thread; the one that was unused longest is closed for another."""


class Engine:
    """A worker's, from the start until :meth:`close`.

    Args:
        address: where it listens.
        inbox: of an engine that takes prompts over.
        outbox: of one that hands them over.
        secret: of all engines.
        message_bytes: the most bytes of data in one message.
        silence: see :data:`SILENCE`.

    Raises:
        OSError: somebody else listens there.
    """

    def __init__(
        self,
        address: Address,
        inbox: Inbox | None,
        outbox: Outbox | None,
        secret: Secret,
        message_bytes: int,
        silence: float = SILENCE,
    ) -> None:
        self.address = address
        self._inbox, self._outbox, self._secret, self._silence = inbox, outbox, secret, silence
        self._limit = max(message_bytes, HEADER_BYTES) + OVERHEAD
        self._context = zmq.Context()
        self._stop = Event()
        self._peers: OrderedDict[Address, zmq.Socket[bytes]] = OrderedDict()
        self._asked: OrderedDict[Address, zmq.Socket[bytes]] = OrderedDict()
        self._flying: dict[Address, tuple[Part, float]] = {}  # with the time at which its engine counts as dead
        self._quiet: dict[Address, float] = {}  # until when an engine that was silent is not tried again
        self._listener = self._socket(zmq.ROUTER, address)
        secret.listen(self._listener, address)
        try:
            self._listener.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"P2P: nobody can listen at {address}: {error}; another kv_port helps") from error
        self._threads = [Thread(target=self._run, args=(self._listen,), name="fl-p2p-listen", daemon=True)]
        if outbox is not None:
            self._threads.append(Thread(target=self._run, args=(self._send,), name="fl-p2p-send", daemon=True))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads and close the sockets; what has not been sent is lost."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._context.destroy(linger=0)

    def _run(self, turn: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                turn()
            except Exception:  # recorded: one bad message or peer must not end the thread
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
        """The socket to an engine. If it is one too many, another one is closed, but none that is ``needed``."""
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
        ready = dict(poller.poll(_ms(TURN)))
        if self._listener in ready:
            self._hear()
        for address, socket in self._asked.items():
            if socket in ready:
                self._hear_answer(address, socket)
        if self._inbox is not None:
            self._ask(self._inbox)

    def _ask(self, inbox: Inbox) -> None:
        for transfer, producer in inbox.questions():
            try:
                self._tell(self._peer(self._asked, producer), Get(transfer))
            except Exception as error:  # recorded: this transfer is lost, and the others are asked for
                inbox.answered(transfer, short(f"the engine at {producer} cannot be asked: {error}"))

    def _hear(self) -> None:
        who, *heard = self._listener.recv_multipart(zmq.NOBLOCK, copy=False)
        try:
            message, data = read([frame.buffer for frame in heard], Put, Get)
        except BadMessage as error:
            logger.warning("P2P: a message to %s is dropped: %s", self.address, error)
            return
        if isinstance(message, Put):
            refused = "this engine takes no prompts over" if self._inbox is None else self._inbox.put(message, data)
            answer: Taken | State = Taken(message.transfer, message.first, short(refused))
        else:
            gone = "this engine hands no prompts over" if self._outbox is None else self._outbox.asked(message.transfer)
            answer = State(message.transfer, short(gone))
        self._tell(self._listener, answer, who.bytes)

    def _hear_answer(self, address: Address, socket: zmq.Socket[bytes]) -> None:
        assert self._inbox is not None
        try:
            state, _ = read(socket.recv_multipart(zmq.NOBLOCK), State)
        except BadMessage as error:
            logger.warning("P2P: an answer from %s is dropped: %s", address, error)
            return
        self._inbox.answered(state.transfer, state.gone)

    def _tell(self, socket: zmq.Socket[bytes], message: Get | Taken | State, *to: bytes) -> None:
        try:
            socket.send_multipart([*to, *frames(message)], zmq.NOBLOCK)
        except zmq.Again:  # nobody reads what we send there; it is asked again, or given up
            logger.debug("P2P: %s is not told %s", to, type(message).__name__)

    # -- the thread that sends ----------------------------------------------------------------------------------------

    def _send(self) -> None:
        assert self._outbox is not None
        part = None
        if len(self._flying) < FLYING:
            part = self._outbox.next(0 if self._flying else TURN, self._flying)
        if part is not None:
            self._send_off(self._outbox, part)
        if self._flying:
            self._land(self._outbox, 0 if part is not None else _ms(TURN))

    def _send_off(self, outbox: Outbox, part: Part) -> None:
        now = time.monotonic()
        if self._quiet.get(part.to, now) > now:
            outbox.failed(part, "its engine did not answer a moment ago")
            return
        put = Put(part.transfer, part.layout, part.first, part.count, part.total)
        try:
            peer = self._peer(self._peers, part.to, self._flying)
            peer.send_multipart(frames(put, part.piece.bytes.numpy().data), zmq.NOBLOCK)
        except Exception as error:  # recorded: its transfer ends
            outbox.failed(part, f"it cannot be sent to {part.to}: {error}")
            return
        self._flying[part.to] = part, now + self._silence

    def _land(self, outbox: Outbox, wait: int) -> None:
        """Hear the answers to parts on their way, and give those up whose engine is silent."""
        poller = zmq.Poller()
        for to in self._flying:
            poller.register(self._peers[to], zmq.POLLIN)
        ready = dict(poller.poll(wait))
        now = time.monotonic()
        for to, (part, deadline) in list(self._flying.items()):
            if self._peers[to] in ready:
                self._hear_taken(outbox, part)
            elif deadline < now:
                del self._flying[to]
                self._peers.pop(to).close()
                self._quiet = {one: until for one, until in self._quiet.items() if until > now}
                self._quiet[to] = now + self._silence
                outbox.failed(part, f"the engine at {to} does not answer")

    def _hear_taken(self, outbox: Outbox, part: Part) -> None:
        try:
            taken, _ = read(self._peers[part.to].recv_multipart(zmq.NOBLOCK), Taken)
        except BadMessage as error:
            logger.warning("P2P: an answer from %s is dropped: %s", part.to, error)
            return
        if (taken.transfer, taken.first) != (part.transfer, part.first):
            return  # it is late
        del self._flying[part.to]
        if taken.refused:
            outbox.failed(part, taken.refused)
        else:
            outbox.sent(part)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
