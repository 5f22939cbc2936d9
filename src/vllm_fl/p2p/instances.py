"""The engines that a proxy knows: those whose heartbeat it has heard lately, in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fl_dispatch.logger_manager import get_logger

from .heartbeat import EVERY
from .messages import BadMessage, Heartbeat
from .route import Address

logger = get_logger(__name__)

GONE_AFTER = 3.5 * EVERY
"""Seconds without a heartbeat after which an engine gets no more requests."""
MOST = 1024
"""Engines that a proxy remembers."""


@dataclass
class Instance:
    """One engine."""

    http: Address
    zmq: Address
    role: str
    heard: float
    served: int = 0


class Instances:
    """All of them. Not safe for threads."""

    def __init__(self) -> None:
        self._known: dict[Address, Instance] = {}  # by the address of the HTTP server

    def hear(self, beat: Heartbeat) -> None:
        """An engine is there.

        Raises:
            BadMessage: its addresses are none, or there are too many engines.
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
        known.zmq, known.role, known.heard = zmq, beat.role, time.monotonic()

    def lose(self, instance: Instance, why: str) -> None:
        """An engine has failed; it comes back with its next heartbeat."""
        if self._known.pop(instance.http, None) is not None:
            logger.warning("P2P: engine %s has gone: %s", instance.http, why)

    def of(self, role: str) -> list[Instance]:
        """The engines of a role, ``P`` or ``D``, the one that has served least first."""
        oldest = time.monotonic() - GONE_AFTER
        for silent in [one for one in self._known.values() if one.heard < oldest]:
            self.lose(silent, f"no heartbeat for {GONE_AFTER:g} s")
        return sorted((one for one in self._known.values() if role in one.role), key=lambda one: one.served)
