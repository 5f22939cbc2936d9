"""The engines that a proxy knows from their last heartbeats, and how busy they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fl_dispatch.logger_manager import get_logger

from ..protocol.heartbeat import EVERY
from ..protocol.messages import BadMessage, Heartbeat
from ..protocol.route import Address

logger = get_logger(__name__)

GONE_AFTER = 3.5 * EVERY
"""Seconds without a heartbeat after which an engine gets no more requests."""
HELD_BACK = EVERY
"""Seconds after a failure before which no heartbeat brings an engine back."""
MOST = 1024
"""Engines that a proxy remembers."""


@dataclass
class Instance:
    """One engine.

    Args:
        http, zmq, role: fields of its heartbeat.
        last_heard: time of the last heartbeat.
        there: whether a heartbeat came since it failed and was held back.
        back_at: the earliest time for such a heartbeat.
        requests: number of its current requests.
        failures: number of failures since its last answer.
        turn: the number of its last request.
    """

    http: Address
    zmq: Address
    role: str
    last_heard: float
    there: bool = True
    back_at: float = 0.0
    requests: int = 0
    failures: int = 0
    turn: int = 0


class Instances:
    """The engines of a proxy. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[Address, Instance] = {}  # by the address of the HTTP server
        self._turns = 0

    def note_heartbeat(self, beat: Heartbeat) -> None:
        """Process a heartbeat.

        Raises:
            BadMessage: its addresses are invalid, or there are too many engines.
        """
        try:
            http, zmq = Address.parse(beat.http), Address.parse(beat.zmq)
        except ValueError as error:
            raise BadMessage(str(error)) from error
        known = self._known.get(http)
        if known is None:
            if len(self._known) >= MOST:
                raise BadMessage(f"more than {MOST} engines")
            known = self._known[http] = Instance(http, zmq, beat.role, 0.0)
            logger.info("P2P: engine %s (%s) has come, its KV cache at %s", http, beat.role, zmq)
        known.zmq, known.role, known.last_heard = zmq, beat.role, time.monotonic()
        known.there = known.there or known.last_heard >= known.back_at

    @contextmanager
    def serving(self, instance: Instance) -> Iterator[None]:
        """Count a request of an engine during the block."""
        self._turns += 1
        instance.turn = self._turns
        instance.requests += 1
        try:
            yield
        finally:
            instance.requests -= 1

    def answered(self, instance: Instance) -> None:
        """Record that an engine has answered."""
        instance.failures = 0

    def failed(self, instance: Instance, why: str) -> None:
        """Record a failure: a later heartbeat brings the engine back, and until it answers it is the last choice."""
        instance.failures += 1
        instance.there, instance.back_at = False, time.monotonic() + HELD_BACK
        logger.warning("P2P: engine %s has failed: %s", instance.http, why)

    def of(self, role: str) -> list[Instance]:
        """Return the engines of a role, ``P`` or ``D``: those without failures first, then the least busy, in turn."""
        oldest = time.monotonic() - GONE_AFTER
        for silent in [one for one in self._known.values() if one.last_heard < oldest]:
            del self._known[silent.http]
            logger.warning("P2P: engine %s has gone: no heartbeat for %g s", silent.http, GONE_AFTER)
        there = [one for one in self._known.values() if one.there and role in one.role]
        return sorted(there, key=lambda one: (one.failures > 0, one.requests, one.turn))
