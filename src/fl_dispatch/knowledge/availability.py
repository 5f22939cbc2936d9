"""Availability of implementations on this machine, each checked once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..importing import NOT_YET
from ..locking import writers
from ..logger_manager import get_logger
from ..types import OpImpl

logger = get_logger(__name__)
Answer = tuple[bool, str]

SLOW = 5.0
"""Seconds after which a check is logged as slow, because it delays every process of a host."""


class Availability:
    """The answers of availability checks. Owned by one manager.

    A thread does not wait for another thread's check, because the check may import a module that waits for the first
    thread. Threads that need an answer at the same time each run the check, and the first answer holds. A check that
    dispatches finds its own implementation unavailable meanwhile.
    """

    def __init__(self) -> None:
        self._answers: dict[OpImpl, Answer] = {}
        self._asking: set[tuple[OpImpl, int]] = set()
        self.unanswered: set[OpImpl] = set()
        """Implementations to check again, because their check needs a module that is being imported."""
        self.slow: dict[str, float] = {}
        """Implementation's id → seconds of its slowest check, if that was slow."""

    @property
    def answers(self) -> Mapping[OpImpl, Answer]:
        """Return all answers: a growing mapping, replaced after all checks were repeated, or one was inconclusive."""
        return self._answers

    def of(self, impl: OpImpl) -> Answer:
        """Return whether an implementation can run here, and a message why not."""
        answers, asked = self._answers, (impl, threading.get_ident())
        answer = answers.get(impl)
        if answer is not None:
            return answer
        if asked in self._asking:
            return False, "its availability is being asked"
        self._asking.add(asked)
        try:
            started = time.perf_counter()
            answer = impl.availability()
            self._warn_if_slow(impl, time.perf_counter() - started)
        finally:
            self._asking.discard(asked)
        if answer[1] == NOT_YET:
            self.unanswered.add(impl)
            return answer
        self.unanswered.discard(impl)
        return answers.setdefault(impl, answer)

    def _warn_if_slow(self, impl: OpImpl, seconds: float) -> None:
        if seconds > SLOW and impl.impl_id not in self.slow:
            logger.warning("is_available of '%s' (%s) took %.1f s", impl.impl_id, impl.place, seconds)
        if seconds > SLOW:
            self.slow[impl.impl_id] = max(seconds, self.slow.get(impl.impl_id, 0.0))

    @contextmanager
    def asked_again(self) -> Iterator[None]:
        """Repeat all checks; the old answers come back if the block raises."""
        with writers:
            before, self._answers = self._answers, {}
            try:
                yield
            except BaseException:
                self._answers = before
                raise

    def forget_who_asks(self) -> None:
        """Forget checks of other threads in a forked child, because the threads do not exist there."""
        self._asking = {asked for asked in self._asking if asked[1] == threading.get_ident()}
