"""Which live calls are compared: a share of them, while the time that comparing has taken is within a budget."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..locking import ForkableLock
from ..settings import Settings
from ..types import OpImpl, match_token

_account = ForkableLock()  # of the costs alone: a drawn call does not wait for threads that change something
NEVER = 2.0**62
"""More calls than any process makes: the quotient of a share below 1e-307 is infinite."""
SAVED_SECONDS = 10.0
"""Seconds for which an unused budget is saved, so that an idle server does not compare all calls of a burst."""


@dataclass(frozen=True)
class Wish:
    """The user's settings of shadow mode.

    Args:
        share: of the calls, in (0, 1].
        operators: the only ones; ``None`` for all.
        second: the token of the implementation to compare with.
        ban: a wrong implementation is taken out of service.
        budget: the most that comparing may cost, as a share of time.
    """

    share: float
    operators: frozenset[str] | None
    second: str
    ban: bool
    budget: float

    @classmethod
    def of(cls, settings: Settings) -> Wish | None:
        """The settings of shadow mode; ``None`` where it is off."""
        if not (settings.shadow_share and settings.shadow_budget and settings.policy.enabled):
            return None
        return cls(
            settings.shadow_share,
            settings.shadow_operators,
            settings.shadow_second,
            settings.shadow_action == "ban",
            settings.shadow_budget,
        )


class Sampling:
    """Draws calls and keeps their cost within the budget. Shared by all calls of a manager.

    Args:
        wish: the settings.
        clock: seconds.

    Attributes:
        seconds: what comparing has cost until now.
        passed_over: calls that were drawn while the budget was spent.
        every_call: draw all calls of this thread's step, because steps are drawn instead.
    """

    def __init__(self, wish: Wish, clock: Callable[[], float] = time.perf_counter) -> None:
        self.wish, self.clock = wish, clock
        self.seconds = 0.0
        self.passed_over = 0
        self.every_call = False
        self._busy = threading.local()
        self._started = self._credited = clock()
        self._credit = 0.0

    def wants(self, op_name: str) -> bool:
        """Whether an operator's calls are compared."""
        return self.wish.operators is None or op_name in self.wish.operators

    def is_second(self, impl: OpImpl) -> bool:
        """Whether the user asks for comparison with this implementation."""
        return match_token(impl, self.wish.second)

    def gaps(self, place: str) -> Iterator[int]:
        """The number of calls up to and including the next one that is drawn; the same on all ranks for one place."""
        draw, share = random.Random(place).random, self.wish.share
        while True:  # how many calls pass before one that each call is with this probability
            yield 1 if share == 1 else 1 + int(min(math.log1p(-draw()) / math.log1p(-share), NEVER))

    def affordable(self) -> bool:
        """Whether a drawn call may be compared now: not inside another one, and not over the budget."""
        if getattr(self._busy, "now", False):
            return False
        with _account:
            now = self.clock()
            most = SAVED_SECONDS * self.wish.budget
            self._credit = min(most, self._credit + (now - self._credited) * self.wish.budget)
            self._credited = now
            if self._credit > 0:
                return True
            self.passed_over += 1
            return False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, time is the cost of comparing, and calls are not compared in their turn."""
        began, self._busy.now = self.clock(), True
        try:
            yield
        finally:
            self._busy.now = False
            self.charge(self.clock() - began)

    def charge(self, seconds: float) -> None:
        """Comparing has cost so much more."""
        with _account:
            self.seconds += seconds
            self._credit -= seconds

    def share_of_time(self) -> float:
        """The cost of comparing until now, as a share of the time since the start."""
        return self.seconds / max(self.clock() - self._started, 1e-9)
