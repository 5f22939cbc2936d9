"""Links: a wire to another engine with the thread that uses it, and what an engine knows of those that it has.

A link goes one way, and one thread does all that is asked of it, one thing after the other. So both ends of a wire do
the same in the same order, and no thread of the engine's waits for a peer. A link that is overdue is cut; then bytes
travel through main memory, and what was on its way is computed where it is needed.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread

from fl_dispatch.logger_manager import get_logger

from .messages import Meet, short
from .pool import BuddyPool
from .route import Address
from .wires import Wire, Wiring

logger = get_logger(__name__)

OPENING = 30.0
"""Seconds within which both ends of a wire are there."""
LINKS = 32
"""Links of an engine in either direction; each has buffers on the device. The one that was unused longest is cut."""
CLOSING = 2.0
"""Seconds that closing a link waits for what it is at, and then for its library."""
CUT = "it was closed"

Use = Callable[[Wire], None]
Done = Callable[[str], None]


class Link:
    """A wire that a thread makes and then uses.

    Args:
        make: makes the wire.
        opened: called once it is there.
        limit: seconds that one use may take.
    """

    def __init__(self, make: Callable[[], Wire], opened: Callable[[], None], limit: float) -> None:
        self._make, self._opened, self._limit = make, opened, limit
        self._lock = Lock()
        self._uses: SimpleQueue[tuple[Use, Done] | None] = SimpleQueue()
        self._wire: Wire | None = None
        self._cutting: Thread | None = None
        self._until = time.monotonic() + OPENING
        self.broken = ""
        """Why nothing goes by it any more."""
        self._thread = Thread(target=self._run, name="fl-p2p-link", daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        """Whether bytes can go by it."""
        return self._wire is not None and not self.broken

    def post(self, use: Use, done: Done) -> None:
        """Have the thread use the wire; ``done`` hears in the end why that failed, or nothing."""
        with self._lock:
            if not self.broken:
                self._uses.put((use, done))
                return
        done(self.broken)

    def tend(self) -> None:
        """Cut it if it takes too long."""
        if self._until < time.monotonic():
            took = self._limit if self._wire is not None else OPENING
            self.cut(f"its other end did nothing for {took:g} s")

    def cut(self, why: str) -> None:
        """End it; uses that wait fail. The wire may have to wait for its library, so a thread of its own cuts it."""
        with self._lock:
            if self.broken:
                return
            self.broken = why
            self._uses.put(None)
            if self._wire is not None:
                self._cutting = Thread(target=self._wire.cut, name="fl-p2p-cut", daemon=True)
                self._cutting.start()

    def close(self) -> None:
        """End it, if possible after what it is at."""
        self._uses.put(None)
        self._thread.join(CLOSING)
        self.cut(CUT)
        if self._cutting is not None:
            self._cutting.join(CLOSING)

    def _run(self) -> None:
        if (wire := self._made()) is not None:
            self._opened()
        while (asked := self._uses.get()) is not None:
            use, done = asked
            if wire is not None and not self.broken:
                self._until = time.monotonic() + self._limit
                try:
                    use(wire)
                except Exception as error:  # recorded: nothing more goes by this link
                    self.cut(short(str(error)))
                self._until = math.inf
            done(self.broken)

    def _made(self) -> Wire | None:
        try:
            wire = self._make()
        except Exception as error:  # recorded: nothing goes by this link
            self.cut(short(f"it could not be made: {error}"))
            return None
        with self._lock:
            if not self.broken:
                self._wire, self._until = wire, math.inf
                return wire
        wire.cut()  # somebody has given it up meanwhile
        return None


class Outgoing:
    """The links by which an engine sends. The thread that sends calls its methods, and any thread :meth:`pool`.

    Args:
        wiring: makes their wires.
        own: this engine's address, by which a receiver knows a restarted one.
        limit: see :class:`Link`.
    """

    def __init__(self, wiring: Wiring, own: Address, limit: float) -> None:
        self._wiring, self._own, self._limit = wiring, own, limit
        self._asked: dict[Address, Meet] = {}
        self._links: OrderedDict[Address, tuple[str, Link]] = OrderedDict()
        self._pool: BuddyPool | None = None
        self._not_before: dict[Address, float] = {}

    def pool(self, to: Address) -> BuddyPool | None:
        """Memory of the device for what goes to an engine, if a link does."""
        link = self.link(to)
        return self._pool if link is not None else None

    def link(self, to: Address) -> Link | None:
        """The open link to an engine."""
        found = self._links.get(to)
        return found[1] if found is not None and found[1].open else None

    def name(self, to: Address) -> str:
        """The name of the open link to an engine, or nothing."""
        if self.link(to) is None:
            return ""
        self._links.move_to_end(to)
        return self._links[to][0]

    def meet(self, to: Address) -> Meet | None:
        """A question for a link to this engine, if it is time to ask."""
        now = time.monotonic()
        if to in self._links or to in self._asked or self._not_before.get(to, now) > now:
            return None
        kind = self._wiring.kind
        try:
            self._pool = self._pool or BuddyPool(self._wiring.capacity, device=self._wiring.device)
            meet = Meet(uuid.uuid4().hex, kind.name, kind.ticket(), str(self._own))
        except (OSError, RuntimeError) as error:  # its library, or no memory
            self._give_up(to, short(str(error)))
            return None
        self._asked[to] = meet
        return meet

    def met(self, to: Address, name: str, refused: str) -> None:
        """An engine's answer to :meth:`meet`."""
        meet = self._asked.pop(to, None)
        if meet is None or meet.name != name:
            return
        if refused:
            self._give_up(to, refused)
            return
        wiring = self._wiring
        self._links[to] = (
            name,
            Link(
                lambda: wiring.kind.open(meet.ticket, 0, wiring.device),
                lambda: logger.info("P2P: keys and values go to %s from device to device, by %s", to, meet.kind),
                self._limit,
            ),
        )
        for unused in list(self._links)[:-LINKS]:
            self.cut(unused, CUT)

    def cut(self, to: Address, why: str) -> None:
        """Nothing goes by a link to this engine for a while."""
        self._asked.pop(to, None)
        found = self._links.pop(to, None)
        if found is not None:
            found[1].cut(why)
            self._give_up(to, found[1].broken)

    def tend(self) -> None:
        """Cut links that take too long, and forget those that are broken."""
        for to, (_, link) in list(self._links.items()):
            link.tend()
            if link.broken:
                self.cut(to, link.broken)

    def close(self) -> None:
        """End all links."""
        for _, link in self._links.values():
            link.close()
        self._links.clear()

    def _give_up(self, to: Address, why: str) -> None:
        now = time.monotonic()
        self._not_before = {one: until for one, until in self._not_before.items() if until > now}
        self._not_before[to] = now + OPENING
        logger.warning("P2P: keys and values go to %s through main memory, because of the link that way: %s", to, why)


@dataclass(frozen=True)
class _Incoming:
    sender: str
    link: Link


class Incoming:
    """The links by which an engine receives; the thread that listens calls its methods. See :class:`Outgoing`."""

    def __init__(self, wiring: Wiring, limit: float) -> None:
        self._wiring, self._limit = wiring, limit
        self._links: OrderedDict[str, _Incoming] = OrderedDict()
        self.pool: BuddyPool | None = None
        """Memory of the device for what comes by links, once there is one."""

    def welcome(self, meet: Meet) -> str:
        """Make the other end of a link that an engine asks for; the answer is empty, or says why there is none."""
        wiring = self._wiring
        if meet.kind != wiring.kind.name:
            return f"its wires are made by {meet.kind}, and ours by {wiring.kind.name}"
        try:
            self.pool = self.pool or BuddyPool(wiring.capacity, device=wiring.device)
        except (OSError, RuntimeError) as error:  # its library, or no memory
            return str(error)
        earlier = [name for name, known in self._links.items() if known.sender == meet.sender]
        for name in (*earlier, *list(self._links)[: max(0, len(self._links) + 1 - LINKS)]):
            self._cut(name, CUT)
        link = Link(
            lambda: wiring.kind.open(meet.ticket, 1, wiring.device),
            lambda: logger.info("P2P: keys and values come from %s from device to device", meet.sender),
            self._limit,
        )
        self._links[meet.name] = _Incoming(meet.sender, link)
        return ""

    def link(self, name: str) -> Link | None:
        """The link of that name, if it is there."""
        known = self._links.get(name)
        if known is None or known.link.broken:
            return None
        self._links.move_to_end(name)
        return known.link

    def tend(self) -> None:
        """Cut links that take too long, and forget those that are broken."""
        for name, known in list(self._links.items()):
            known.link.tend()
            if known.link.broken:
                logger.warning("P2P: nothing comes from %s by its link: %s", known.sender, known.link.broken)
                self._cut(name, known.link.broken)

    def close(self) -> None:
        """End all links."""
        for known in self._links.values():
            known.link.close()
        self._links.clear()

    def _cut(self, name: str, why: str) -> None:
        known = self._links.pop(name, None)
        if known is not None:
            known.link.cut(why)
