"""Draw the live calls to compare: a share of them, while the cost of comparing stays within a budget."""

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

_account = ForkableLock()  # guards the costs alone: a drawn call does not wait for threads that change something
NEVER = 2.0**62
"""A number of calls beyond any process: the quotient for a share below 1e-307 is infinite."""
SAVED_SECONDS = 10.0
"""Seconds for which an unused budget accumulates, so that an idle server does not compare all calls of a burst."""


@dataclass(frozen=True)
class SamplingOptions:
    """The user's settings of shadow mode.

    Args:
        share: the share of calls, in (0, 1].
        operators: the operators to compare; ``None`` for all.
        second: the token of the implementation to compare with.
        ban: whether a wrong implementation is banned.
        budget: the largest share of time that comparing may take.
    """

    share: float
    operators: frozenset[str] | None
    second: str
    ban: bool
    budget: float

    @classmethod
    def of(cls, settings: Settings) -> SamplingOptions | None:
        """Return the settings of shadow mode; ``None`` if it is off."""
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
        options: the settings.
        clock: returns seconds.

    Attributes:
        seconds: the time that comparing has taken.
        passed_over: drawn calls that were skipped because the budget was spent.
        every_call: whether to draw all calls of this thread's step, because steps are drawn instead.
    """

    def __init__(self, options: SamplingOptions, clock: Callable[[], float] = time.perf_counter) -> None:
        self.options, self.clock = options, clock
        self.seconds = 0.0
        self.passed_over = 0
        self.every_call = False
        self._busy = threading.local()
        self._started = self._credited = clock()
        self._credit = 0.0

    def wants(self, op_name: str) -> bool:
        """Whether an operator's calls are compared."""
        return self.options.operators is None or op_name in self.options.operators

    def is_second(self, impl: OpImpl) -> bool:
        """Whether the user asks for comparison with this implementation."""
        return match_token(impl, self.options.second)

    def gaps(self, place: str) -> Iterator[int]:
        """Yield numbers of calls up to the next drawn one, inclusive; all ranks draw the same calls for one place."""
        draw, share = random.Random(place).random, self.options.share
        while True:  # geometric distribution of the gap to the next call
            yield 1 if share == 1 else 1 + int(min(math.log1p(-draw()) / math.log1p(-share), NEVER))

    def affordable(self) -> bool:
        """Whether a drawn call may be compared now: not inside another comparison, and within the budget."""
        if getattr(self._busy, "now", False):
            return False
        with _account:
            now = self.clock()
            most = SAVED_SECONDS * self.options.budget
            self._credit = min(most, self._credit + (now - self._credited) * self.options.budget)
            self._credited = now
            if self._credit > 0:
                return True
            self.passed_over += 1
            return False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Charge the block's time as a cost of comparing, and compare no calls in it."""
        began, self._busy.now = self.clock(), True
        try:
            yield
        finally:
            self._busy.now = False
            self.charge(self.clock() - began)

    def charge(self, seconds: float) -> None:
        """Add seconds to the cost of comparing."""
        with _account:
            self.seconds += seconds
            self._credit -= seconds

    def share_of_time(self) -> float:
        """Return the cost of comparing so far, as a share of the time since the start."""
        return self.seconds / max(self.clock() - self._started, 1e-9)
