"""Links: a wire to another engine with its thread, and an engine's record of its links.

A link has one direction, and one thread does all its work in order. So both ends of a wire do the same in the same
order, and no engine thread waits for a peer. An overdue link is cut. Then bytes travel through main memory, and the
engine that needs a cache lost in flight computes it.

Two engines first meet, and only then the sender makes a ticket, because a ticket's maker waits until both have used it.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

from fl_dispatch.logger_manager import get_logger

from ..memory.pool import BuddyPool
from ..protocol.messages import Meet, Ticket, short
from ..protocol.route import Address
from .wires import Wire, Wiring

logger = get_logger(__name__)

OPENING = 30.0
"""Seconds within which both ends of a wire must be open."""
AGAIN_MOST = 3600.0
"""The most seconds until an engine is asked for a link again: first :data:`OPENING`, then doubled each time."""
OPENINGS = 4
"""Links that other engines may have opening at a time, because a peer may never finish."""
LINKS = 32
"""Links of an engine in either direction; each has device buffers. The one unused longest is cut."""
CLOSING = 2.0
"""Seconds that closing all links waits for their current work, and then for their library."""
CUT = "it was closed"

Use = Callable[[Wire], None]
Done = Callable[[str], None]


class Link:
    """A wire that a thread makes and then uses.

    Args:
        make: makes the wire; it fails once the event is set, and so do the wire's calls.
        opened: called once it is open.
        limit: seconds that one use may take.
    """

    def __init__(self, make: Callable[[Event], Wire], opened: Callable[[], None], limit: float) -> None:
        self._make, self._opened, self._limit = make, opened, limit
        self._lock = Lock()
        self._uses: SimpleQueue[tuple[Use, Done] | None] = SimpleQueue()
        self._wire: Wire | None = None
        self._given_up = Event()
        self._until = time.monotonic() + OPENING
        self.broken = ""
        """Why the link is no longer used; empty while it is."""
        self._thread = Thread(target=self._run, name="fl-p2p-link", daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        """Whether bytes can use the link."""
        return self.made and not self.broken

    @property
    def made(self) -> bool:
        """Whether the link was ever open."""
        return self._wire is not None

    def post(self, use: Use, done: Done) -> None:
        """Make the thread use the wire; ``done`` finally gets the error, or an empty string."""
        with self._lock:
            if not self.broken:
                self._uses.put((use, done))
                return
        done(self.broken)

    def tend(self) -> None:
        """Cut the link if it takes too long."""
        if self._until < time.monotonic():
            took = self._limit if self.made else OPENING
            self.cut(f"its other end did nothing for {took:g} s")

    def cut(self, why: str) -> None:
        """Stop using the link; its thread ends the wire, and then all waiting parts fail."""
        with self._lock:
            if not self.broken:
                self.broken = why
                self._given_up.set()
                self._uses.put(None)

    def finish(self) -> None:
        """End the thread after its queued work."""
        self._uses.put(None)

    @property
    def ended(self) -> bool:
        """Whether the thread and the wire are gone."""
        return not self._thread.is_alive()

    def join(self, until: float) -> None:
        """Wait for the thread, at most until that time."""
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        if (wire := self._made()) is not None:
            self._opened()
        while (asked := self._uses.get()) is not None:
            self._use(wire, *asked)
        self.cut(CUT)
        with suppress(Empty):
            while True:
                if (asked := self._uses.get_nowait()) is not None:
                    self._use(None, *asked)
        if wire is not None:
            self._end(wire)

    def _use(self, wire: Wire | None, use: Use, done: Done) -> None:
        if wire is not None and not self.broken:
            self._until = time.monotonic() + self._limit
            try:
                use(wire)
            except Exception as error:  # logged: this link is no longer used
                self.cut(short(str(error)))
            self._until = math.inf
        done(self.broken)

    def _made(self) -> Wire | None:
        try:
            wire = self._make(self._given_up)
        except Exception as error:  # logged: this link is no longer used
            self.cut(short(f"it could not be made: {error}"))
            return None
        with self._lock:
            if not self.broken:
                self._wire, self._until = wire, math.inf
                return wire
        self._end(wire)  # the link was given up meanwhile
        return None

    def _end(self, wire: Wire) -> None:
        try:
            wire.end()
        except Exception as error:  # logged: the wire is no longer used
            logger.warning("P2P: a link did not end well: %s", error)


def close(links: Iterable[Link]) -> None:
    """End links, all at once, and if possible after their current work."""
    links = list(links)
    for stop in (Link.finish, lambda link: link.cut(CUT)):
        for link in links:
            stop(link)
        until = time.monotonic() + CLOSING
        for link in links:
            link.join(until)


def _alive(links: Iterable[Link]) -> list[Link]:
    return [link for link in links if not link.ended]


class Outgoing:
    """The links by which an engine sends. The sending thread calls its methods, and any thread :meth:`pool`.

    Args:
        wiring: makes their wires.
        own: this engine's address, by which a receiver knows a restarted one.
        limit: see :class:`Link`.
    """

    def __init__(self, wiring: Wiring, own: Address, limit: float) -> None:
        self._wiring, self._own, self._limit = wiring, own, limit
        self._asked: dict[Address, tuple[str, float]] = {}  # the name of a meeting, and until when an answer counts
        self._links: OrderedDict[Address, tuple[str, Link]] = OrderedDict()
        self._pool: BuddyPool | None = None
        self._refused: dict[Address, tuple[float, float]] = {}  # the time to ask again, and the wait that ends then
        self._ending: list[Link] = []

    def pool(self, to: Address) -> BuddyPool | None:
        """Return device memory for parts to an engine, if a link to it exists."""
        link = self.link(to)
        return self._pool if link is not None else None

    def link(self, to: Address) -> Link | None:
        """Return the open link to an engine."""
        found = self._links.get(to)
        return found[1] if found is not None and found[1].open else None

    def name(self, to: Address) -> str:
        """Return the name of the open link to an engine; empty without a link."""
        if self.link(to) is None:
            return ""
        self._links.move_to_end(to)
        return self._links[to][0]

    def meet(self, to: Address) -> Meet | None:
        """Return a request for a link to this engine, if it is time to ask."""
        now = time.monotonic()
        self._asked = {one: asked for one, asked in self._asked.items() if asked[1] > now}
        if to in self._links or to in self._asked or self._refused.get(to, (now, 0))[0] > now:
            return None
        meet = Meet(uuid.uuid4().hex, self._wiring.kind.name, str(self._own))
        self._asked[to] = meet.name, now + OPENING
        return meet

    def met(self, to: Address, name: str, refused: str) -> Ticket | None:
        """Take an engine's answer to :meth:`meet`, or to the ticket; return the next ticket to send, if any."""
        if self._links.get(to, ("",))[0] == name and refused:
            self.cut(to, refused)
        if self._asked.get(to, ("",))[0] != name:
            return None
        del self._asked[to]
        wiring = self._wiring
        try:
            if refused:
                raise RuntimeError(refused)
            self._pool = self._pool or BuddyPool(wiring.capacity, device=wiring.device)
            ticket = wiring.kind.ticket()
        except (OSError, RuntimeError) as error:  # the receiver, or the library, or no memory
            self._give_up(to, short(str(error)))
            return None
        self._links[to] = (
            name,
            Link(
                lambda given_up: wiring.kind.open(ticket, 0, wiring.device, given_up),
                lambda: logger.info("P2P: keys and values go to %s from device to device, by %s", to, wiring.kind.name),
                self._limit,
            ),
        )
        for unused in list(self._links)[:-LINKS]:
            self.cut(unused, CUT)
        return Ticket(name, ticket)

    def cut(self, to: Address, why: str) -> None:
        """Use no link to this engine for a while."""
        self._asked.pop(to, None)
        found = self._links.pop(to, None)
        if found is not None:
            if found[1].made:
                self._refused.pop(to, None)  # a link to it is possible, so it is asked again soon
            found[1].cut(why)
            self._ending = [*_alive(self._ending), found[1]]
            self._give_up(to, found[1].broken)

    def tend(self) -> None:
        """Cut links that take too long, and forget broken ones."""
        for to, (_, link) in list(self._links.items()):
            link.tend()
            if link.broken:
                self.cut(to, link.broken)

    def all(self) -> list[Link]:
        """Return the links, to be closed."""
        return [*(link for _, link in self._links.values()), *self._ending]

    def _give_up(self, to: Address, why: str) -> None:
        now = time.monotonic()
        self._refused = {one: known for one, known in self._refused.items() if known[0] > now - AGAIN_MOST}
        wait = min(max(OPENING, 2 * self._refused.get(to, (0, 0))[1]), AGAIN_MOST)
        self._refused[to] = now + wait, wait
        logger.warning("P2P: keys and values go to %s through main memory, because of the link that way: %s", to, why)


@dataclass
class _Incoming:
    sender: str
    link: Link
    new: bool = True  # not seen open yet


class Incoming:
    """The links by which an engine receives; the listening thread calls its methods. See :class:`Outgoing`."""

    def __init__(self, wiring: Wiring, limit: float) -> None:
        self._wiring, self._limit = wiring, limit
        self._expected: OrderedDict[str, str] = OrderedDict()  # name of a meeting → sender
        self._links: OrderedDict[str, _Incoming] = OrderedDict()
        self._ending: list[Link] = []  # in no table any more, but their threads are not done
        self.ready = False
        """Whether the engine's device is free for links; false while vLLM tries and captures the model."""
        self.pool: BuddyPool | None = None
        """Device memory for parts that arrive by links, once there is one."""

    def welcome(self, meet: Meet) -> str:
        """Agree to a link that an engine asks for; return empty, or why there is none."""
        if meet.kind != self._wiring.kind.name:
            return f"its wires are made by {meet.kind}, and ours by {self._wiring.kind.name}"
        if not self.ready:
            return "this engine is still starting"
        if meet.name in self._links:
            return "this engine has a link of that name"
        if self._busy() >= OPENINGS:
            return f"this engine opens {OPENINGS} other links now"
        self._expected[meet.name] = meet.sender
        while len(self._expected) > LINKS:
            self._expected.popitem(last=False)
        return ""

    def open(self, told: Ticket) -> str:
        """Make the other end of a link; return :meth:`welcome`'s answer."""
        wiring, sender = self._wiring, self._expected.pop(told.name, None)
        if sender is None:
            return "this engine does not expect that link any more"
        if self._busy() >= OPENINGS:
            return f"this engine opens {OPENINGS} other links now"
        try:
            self.pool = self.pool or BuddyPool(wiring.capacity, device=wiring.device)
        except (OSError, RuntimeError) as error:  # its library, or no memory
            return str(error)
        link = Link(
            lambda given_up: wiring.kind.open(told.ticket, 1, wiring.device, given_up),
            lambda: logger.info("P2P: keys and values come from %s from device to device", sender),
            self._limit,
        )
        self._links[told.name] = _Incoming(sender, link)
        return ""

    def link(self, name: str) -> Link | None:
        """Return the link of that name, if it exists."""
        known = self._links.get(name)
        if known is None or known.link.broken:
            return None
        self._links.move_to_end(name)
        return known.link

    def tend(self) -> None:
        """Cut links that take too long or that are replaced, and forget broken ones."""
        for name, known in list(self._links.items()):
            known.link.tend()
            if known.new and known.link.open:
                known.new = False
                self._replace(name, known.sender)
            if known.link.broken and self._links.pop(name, None) is not None:
                self._ending.append(known.link)
                logger.warning("P2P: nothing comes from %s by its link: %s", known.sender, known.link.broken)

    def all(self) -> list[Link]:
        """Return the links, to be closed."""
        return [*(known.link for known in self._links.values()), *self._ending]

    def _busy(self) -> int:
        """Count links that open or end: each may hold a thread, in a library call that cannot be interrupted."""
        self._ending = _alive(self._ending)
        return sum(known.new for known in self._links.values()) + len(self._ending)

    def _replace(self, name: str, sender: str) -> None:
        """Cut earlier links from the sender of an open one, and if need be the one unused longest."""
        others = {one: known for one, known in self._links.items() if one != name and not known.new}
        earlier = [one for one, known in others.items() if known.sender == sender]
        unused = [one for one in others if one not in earlier]
        for one in (*earlier, *unused[: max(0, len(unused) + 1 - LINKS)]):
            known = self._links.pop(one)
            known.link.cut(CUT)
            self._ending.append(known.link)
